# Compiles through ccache where there is one.
find_program(QKV_CCACHE ccache)
if(QKV_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${QKV_CCACHE}")
endif()
