#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace kernel_run {

struct Unmap {
  void* pages;
  size_t size;
  void operator()(void*) const { munmap(pages, size); }
};

/// Full of NaN, so that what is read before it is written shows. After it lies a page that nobody
/// may touch.
inline std::unique_ptr<void, Unmap> memory(int64_t bytes) {
  constexpr int64_t kPage = 65536;  // or a divisor of it
  const int64_t size = (bytes + kPage - 1) / kPage * kPage;
  void* const pages =
      mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  char* const end = static_cast<char*>(pages) + size;
  if (mprotect(end, kPage, PROT_NONE) != 0) throw std::bad_alloc();
  char* const memory = end - (bytes + 63) / 64 * 64;
  std::memset(memory, 0xff, bytes);
  return {memory, Unmap{pages, static_cast<size_t>(size + kPage)}};
}

}  // namespace kernel_run
