# QKV_SANITIZE=address: AddressSanitizer, UndefinedBehaviorSanitizer and libFuzzer's instrumentation.
# QKV_SANITIZE=thread:  ThreadSanitizer.
#
# With clang; scripts/sanitize.sh builds and runs both. LibTorch itself is not instrumented: errors
# show where our code touches memory, also memory of LibTorch's allocator, which asks malloc for it.
set(QKV_SANITIZE "" CACHE STRING "Build with sanitizers: address, thread, or none")
set_property(CACHE QKV_SANITIZE PROPERTY STRINGS "" address thread)

if(NOT QKV_SANITIZE)
  return()
endif()
if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
  message(FATAL_ERROR "qkv: QKV_SANITIZE needs clang, but the compiler is ${CMAKE_CXX_COMPILER_ID}")
endif()
add_compile_options(-O1 -g1 -fno-omit-frame-pointer)
if(QKV_SANITIZE STREQUAL "address")
  # vptr: would need the type information of LibTorch's hidden classes.
  add_compile_options(-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize=vptr
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=address,undefined -fno-sanitize=vptr)
elseif(QKV_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
else()
  message(FATAL_ERROR "qkv: QKV_SANITIZE=${QKV_SANITIZE} is neither address nor thread")
endif()
message(STATUS "qkv: with ${QKV_SANITIZE} sanitizer")
