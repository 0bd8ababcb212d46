#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace qkv::cpu {

/// Memory of loops that run one after the other, not initialized: of each thread, and buffers of
/// all. What is large comes from the system and goes back to it in the end. In the allocator, where
/// results that stay lie in between, pieces of it would add up from call to call.
class Workspace {
 public:
  Workspace() : of_workers_(at::get_num_threads()) {}

  /// At least `bytes` bytes, valid until the next call. Each worker asks for its own, so that
  /// memory is first touched by the thread that uses it.
  void* of_worker(int64_t worker, int64_t bytes) { return of_workers_[worker].at_least(bytes); }
  void* buffers(int64_t bytes) { return buffers_.at_least(bytes); }

 private:
  class Piece {
   public:
    void* at_least(int64_t bytes) {
      if (memory_.get() == nullptr || bytes > bytes_) {
        memory_.clear();
        memory_ = allocate(bytes);
        bytes_ = bytes;
      }
      return memory_.get();
    }

   private:
    static c10::DataPtr allocate(int64_t bytes) {
#if defined(__linux__)
      constexpr int64_t kLarge = int64_t{1} << 20;
      if (bytes >= kLarge) {
        const auto size = static_cast<size_t>(bytes);
        void* memory =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory != MAP_FAILED) {
          madvise(memory, size, MADV_HUGEPAGE);  // or there is a page fault for every 4 KiB
          return {memory, new Mapping{memory, size}, unmap, at::kCPU};
        }
      }
#endif
      return c10::GetCPUAllocator()->allocate(bytes);
    }

#if defined(__linux__)
    struct Mapping {
      void* memory;
      size_t size;
    };
    static void unmap(void* context) {
      const auto* mapping = static_cast<Mapping*>(context);
      munmap(mapping->memory, mapping->size);
      delete mapping;
    }
#endif

    c10::DataPtr memory_;
    int64_t bytes_ = 0;
  };

  std::vector<Piece> of_workers_;
  Piece buffers_;
};

}  // namespace qkv::cpu
