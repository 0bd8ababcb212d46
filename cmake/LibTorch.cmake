# The LibTorch to build against, as the target qkv::libtorch.
#
# find_package(Torch) cannot be used here: the PyPI wheel is a CUDA build, for which it demands a
# CUDA toolkit even of those who only want the CPU, and adds its own architectures to every .cu.
# This looks for the same files and nothing else.
#
#   QKV_TORCH_DIR   the torch directory (with include/ and lib/). Default: the directory that
#                   Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH, as variables or in the environment,
#                   point to or into, else that of the torch which ${Python3_EXECUTABLE} (or python3)
#                   imports, else, of an installed qkv, the one that it was built with.

# The search is made anew each time: only what somebody set is remembered.
set(QKV_TORCH_DIR "" CACHE PATH "The torch directory, with include/ and lib/; empty: look for it")

# Leaves this file, and find_package(qkv), without a LibTorch, nor QKV_TORCH_VERSION.
macro(qkv_without_torch message)
  if(CMAKE_FIND_PACKAGE_NAME STREQUAL "qkv")
    set(qkv_FOUND FALSE)
    set(qkv_NOT_FOUND_MESSAGE "${message}")
    unset(QKV_TORCH_VERSION)
    return()
  endif()
  message(FATAL_ERROR "qkv: ${message}")
endmacro()

# In find_package's order; torch.utils.cmake_prefix_path is torch/share/cmake, and Torch_DIR its Torch.
set(_qkv_named "")
file(TO_CMAKE_PATH "$ENV{Torch_ROOT}" _qkv_root)
file(TO_CMAKE_PATH "$ENV{Torch_DIR}:$ENV{CMAKE_PREFIX_PATH}" _qkv_environment)
foreach(_qkv_prefix IN LISTS Torch_DIR Torch_ROOT _qkv_root CMAKE_PREFIX_PATH _qkv_environment)
  foreach(_qkv_up IN ITEMS "" "/../.." "/../../..")
    if(_qkv_prefix AND NOT _qkv_named
       AND EXISTS "${_qkv_prefix}${_qkv_up}/lib/libtorch_cpu.so"
       AND EXISTS "${_qkv_prefix}${_qkv_up}/include/ATen")
      get_filename_component(_qkv_named "${_qkv_prefix}${_qkv_up}" REALPATH)
    endif()
  endforeach()
endforeach()

if(QKV_TORCH_DIR)
  get_filename_component(_qkv_set "${QKV_TORCH_DIR}" REALPATH)
  if(_qkv_named AND NOT _qkv_named STREQUAL _qkv_set)
    message(STATUS "qkv: not the torch in ${_qkv_named}, as QKV_TORCH_DIR is set (-UQKV_TORCH_DIR)")
  endif()
elseif(_qkv_named)
  set(QKV_TORCH_DIR "${_qkv_named}")
else()
  if(NOT Python3_EXECUTABLE)
    find_program(Python3_EXECUTABLE NAMES python3 python)
  endif()
  # Without importing torch, which would take seconds; and not a torch/ in this folder, which -c would
  # look at first.
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "import sys, importlib.util as u
sys.path = [path for path in sys.path if path]
print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE QKV_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE _qkv_result ERROR_QUIET)
  if(NOT _qkv_result EQUAL 0 AND _qkv_built_with  # set by qkvConfig.cmake
     AND EXISTS "${_qkv_built_with}/lib/libtorch_cpu.so")
    set(QKV_TORCH_DIR "${_qkv_built_with}")
  elseif(NOT _qkv_result EQUAL 0)
    qkv_without_torch("no LibTorch found. Set CMAKE_PREFIX_PATH to a LibTorch, or Python3_EXECUTABLE \
to a Python that has torch (here: ${Python3_EXECUTABLE}).")
  endif()
endif()

set(_qkv_version_h "${QKV_TORCH_DIR}/include/torch/headeronly/version.h")
if(NOT EXISTS "${_qkv_version_h}")
  qkv_without_torch("needs LibTorch 2.11 or later; the one in ${QKV_TORCH_DIR} is older, or none.")
endif()
file(STRINGS "${_qkv_version_h}" _qkv_lines
     REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3"
       QKV_TORCH_VERSION "${_qkv_lines}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" QKV_TORCH_VERSION_MAJOR_MINOR "${QKV_TORCH_VERSION}")
if(QKV_TORCH_VERSION VERSION_LESS 2.11)
  qkv_without_torch(
    "needs LibTorch 2.11 or later; that in ${QKV_TORCH_DIR} is ${QKV_TORCH_VERSION}.")
endif()

# The target is known in the whole directory, variables in a function only: one may be there without
# the other.
if(TARGET qkv::libtorch)
  return()
endif()

add_library(qkv::libtorch INTERFACE IMPORTED)
target_include_directories(qkv::libtorch SYSTEM INTERFACE
  "${QKV_TORCH_DIR}/include" "${QKV_TORCH_DIR}/include/torch/csrc/api/include")
target_link_directories(qkv::libtorch INTERFACE "${QKV_TORCH_DIR}/lib")
# libtorch.so is an umbrella that keeps libtorch_cuda.so, where there is one, from being dropped.
target_link_libraries(qkv::libtorch INTERFACE torch torch_cpu c10)
target_compile_features(qkv::libtorch INTERFACE cxx_std_20)

# at::parallel_for is a template: without OpenMP it is compiled to run on one thread. The runtime
# must be the one that libtorch uses, of which wheels bring their own. (What clang compiles calls
# libomp, which also answers to the names that libtorch calls libgomp's functions by.)
find_package(OpenMP QUIET COMPONENTS CXX)
if(OpenMP_CXX_FOUND)
  add_library(qkv::openmp INTERFACE IMPORTED)
  target_compile_options(qkv::openmp INTERFACE ${OpenMP_CXX_FLAGS})
  file(GLOB _qkv_gomp "${QKV_TORCH_DIR}/lib/libgomp*.so*")
  if(_qkv_gomp AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(GET _qkv_gomp 0 _qkv_gomp)
    target_link_libraries(qkv::openmp INTERFACE "${_qkv_gomp}")
  else()
    target_link_libraries(qkv::openmp INTERFACE ${OpenMP_CXX_LIBRARIES})
  endif()
endif()

message(STATUS "qkv: torch ${QKV_TORCH_VERSION} in ${QKV_TORCH_DIR}")
