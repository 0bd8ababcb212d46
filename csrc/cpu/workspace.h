#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <memory>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace qkv::cpu {

constexpr int64_t kMiB = int64_t{1} << 20;

/// Memory of one thread that stays from call to call: new pages can cost more than the work that is
/// done in them, and what a thread has worked in lies in its caches.
class KeptMemory {
 public:
  /// So much may stay.
  explicit KeptMemory(int64_t most_bytes) : most_bytes_(most_bytes) {}

  /// At least `bytes` bytes, not initialized, valid until the next call; nullptr for more than may
  /// stay.
  void* at_least(int64_t bytes) {
    if (bytes > most_bytes_) return nullptr;
    if (bytes > bytes_) {
      bytes_ = 0;
      memory_.reset();
      memory_.reset(c10::alloc_cpu(bytes));
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { c10::free_cpu(memory); }
  };
  const int64_t most_bytes_;
  int64_t bytes_ = 0;
  std::unique_ptr<void, Free> memory_;
};

/// Memory of loops that run one after the other, not initialized: of each thread, and buffers of
/// all. What is too large for threads to keep comes from the system and goes back to it in the end.
/// In the allocator, where results that stay lie in between, pieces of it would add up from call to
/// call.
class Workspace {
 public:
  Workspace() : of_workers_(at::get_num_threads()) {}

  /// At least `bytes` bytes, valid until the next call. Each worker asks for its own, so that
  /// memory is first touched by the thread that uses it.
  void* of_worker(int64_t worker, int64_t bytes) {
    thread_local KeptMemory kept(8 * kMiB);
    void* const memory = kept.at_least(bytes);
    return memory != nullptr ? memory : of_workers_[worker].at_least(bytes);
  }
  void* buffers(int64_t bytes) {
    thread_local KeptMemory kept(8 * kMiB);  // only a calling thread's
    void* const memory = kept.at_least(bytes);
    return memory != nullptr ? memory : buffers_.at_least(bytes);
  }

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
      if (bytes > 0) {
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
