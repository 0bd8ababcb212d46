#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>

#include "cpu/float_mode.h"
#include "cpu/workspace.h"

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "compile with OpenMP: at::parallel_for is a template that else runs on one thread"
#endif

namespace qkv::cpu {

/// Units of work that threads take one after the other, for under a causal mask they differ widely
/// in size; or a few at a time, if there are many. No result depends on which thread ran what.
class Units {
 public:
  Units(int64_t count, bool one_by_one)
      : count_(count), workers_(std::min<int64_t>(count, at::get_num_threads())) {
    if (!one_by_one && workers_ > 0) few_ = std::max<int64_t>(count / (workers_ * 64), 1);
  }

  int64_t workers() const { return workers_; }

  /// After one unit a thread most likely takes the one so many after it.
  int64_t to_next() const { return few_ > 1 ? 1 : workers_; }

  /// work(unit, scratch) for those that this thread takes.
  template <class Work>
  void run(void* scratch, const Work& work) {
    const FloatMode::Scope as_the_caller(float_mode_);
    for (int64_t unit = next_.fetch_add(few_); unit < count_; unit = next_.fetch_add(few_)) {
      const int64_t end = std::min(unit + few_, count_);
      for (; unit < end; ++unit) work(unit, scratch);
    }
  }

 private:
  int64_t count_, workers_;
  int64_t few_ = 1;
  std::atomic<int64_t> next_{0};
  FloatMode float_mode_;
};

/// Runs work(unit, scratch) for every unit, on as many threads as torch has. one_by_one: if there
/// are many units, a few next to each other may still be much of the work.
template <class Work>
void for_each_unit(int64_t count, int64_t scratch_bytes, Workspace& workspace, const Work& work,
                   bool one_by_one = false) {
  Units units(count, one_by_one);
  at::parallel_for(0, units.workers(), 1, [&](int64_t worker, int64_t) {
    units.run(workspace.of_worker(worker, scratch_bytes), work);
  });
}

/// The same with a workspace of its own.
template <class Work>
void for_each_unit(int64_t count, int64_t scratch_bytes, const Work& work) {
  Workspace workspace;
  for_each_unit(count, scratch_bytes, workspace, work);
}

}  // namespace qkv::cpu
