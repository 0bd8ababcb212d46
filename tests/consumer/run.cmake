# cmake --install to a prefix of its own, then configure, build and run the consumer against it.
set(work "${QKV_BUILD}/consumer")
file(REMOVE_RECURSE "${work}")

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    string(REPLACE ";" " " command "${ARGV}")
    message(FATAL_ERROR "failed: ${command}")
  endif()
endfunction()

# The README's first C++ block is one of the programs.
file(READ "${CMAKE_CURRENT_LIST_DIR}/../../README.md" readme)
string(REGEX MATCH "```cpp\n([^`]*)```" block "${readme}")
file(WRITE "${work}/readme.cpp" "${CMAKE_MATCH_1}")

function(configure folder prefix)
  run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${folder}" -G "${GENERATOR}"
      "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_PREFIX_PATH=${prefix}"
      "-DQKV_TORCH_DIR=${QKV_TORCH_DIR}" "-DREADME_PROGRAM=${work}/readme.cpp")
endfunction()

run("${CMAKE_COMMAND}" --install "${QKV_BUILD}" --prefix "${work}/prefix")
configure("${work}/build" "${work}/prefix")
run("${CMAKE_COMMAND}" --build "${work}/build")
run("${work}/build/trains")
run("${work}/build/by_name")
run("${CMAKE_COMMAND}" -E chdir "${work}" "${work}/build/readme")

# The folder that qkv was built in is found as well.
configure("${work}/beside_build" "${QKV_BUILD}")
