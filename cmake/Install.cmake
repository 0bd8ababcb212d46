# cmake --install: the library, its headers, and the package that find_package(qkv) finds. The same
# tree goes into the Python package (setup.py), whose qkv.cmake_prefix_path points at it.

include(CMakePackageConfigHelpers)

set(_package_dir lib/cmake/qkv)

install(TARGETS qkv EXPORT qkvTargets LIBRARY DESTINATION lib)
install(FILES "${PROJECT_BINARY_DIR}/libqkv.json" DESTINATION lib)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/qkv" DESTINATION include)
install(EXPORT qkvTargets NAMESPACE qkv:: DESTINATION ${_package_dir})
install(FILES "${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake" DESTINATION ${_package_dir})

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/qkvConfig.cmake.in" "${PROJECT_BINARY_DIR}/qkvConfig.cmake"
  INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/qkvConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
# The build folder is such a package, too.
export(EXPORT qkvTargets NAMESPACE qkv::)
configure_file("${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake" "${PROJECT_BINARY_DIR}" COPYONLY)

install(FILES "${PROJECT_BINARY_DIR}/qkvConfig.cmake" "${PROJECT_BINARY_DIR}/qkvConfigVersion.cmake"
        DESTINATION ${_package_dir})
