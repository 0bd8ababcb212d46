#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "compile with OpenMP: at::parallel_for is a template that else runs on one thread"
#endif

namespace qkv::cpu {

/// Runs work(unit, scratch) for every unit, on as many threads as torch has. Threads take the next
/// unit when they are done with one: under a causal mask units differ widely in size. No result
/// depends on which thread ran what.
template <class Work>
void for_each_unit(int64_t units, int64_t scratch_bytes, const Work& work) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(units, at::get_num_threads());
  // In one piece, and from the calling thread: what other threads free goes back to the system at
  // once, and has to be zeroed for them again at the next call.
  const int64_t bytes_of_worker = (scratch_bytes + 4095) / 4096 * 4096;
  const auto scratch = c10::GetCPUAllocator()->allocate(workers * bytes_of_worker);
  at::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    auto* own = static_cast<uint8_t*>(scratch.get()) + worker * bytes_of_worker;
    for (int64_t unit = next++; unit < units; unit = next++) work(unit, own);
  });
}

}  // namespace qkv::cpu
