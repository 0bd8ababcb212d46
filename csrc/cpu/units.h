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
/// unit when they are done with one, under a causal mask units differ widely in size; or the next
/// few, if there are many. No result depends on which thread ran what.
template <class Work>
void for_each_unit(int64_t units, int64_t scratch_bytes, const Work& work) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(units, at::get_num_threads());
  const int64_t few = std::max<int64_t>(units / (std::max<int64_t>(workers, 1) * 64), 1);
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    const auto scratch = c10::GetCPUAllocator()->allocate(scratch_bytes);
    for (int64_t unit = next.fetch_add(few); unit < units; unit = next.fetch_add(few)) {
      const int64_t end = std::min(unit + few, units);
      for (; unit < end; ++unit) work(unit, scratch.get());
    }
  });
}

}  // namespace qkv::cpu
