#pragma once

#include "kernels/cuda/sm80/attention_forward.cuh"
#include "kernels/cuda/sm80/tasks.h"

// Which kernel a call runs, with how many blocks and how much shared memory. Each kernels_*.cu
// compiles this for one element type.

namespace qkv::kernels::sm80 {

template <class Element, int kRowTiles, int kWidth, bool kQueryStays>
int launch_forward(const ForwardTask<float>& task, void* stream) {
  using Shared = ForwardShared<Element, kRowTiles, kWidth>;
  const Problem<float>& p = task.forward.problem;
  const int64_t units =
      RowUnit<Shared::kRows, kWidth>::count(p, output_columns(task), task.splits);
  return device::launch("attention_forward_sm80",
                        attention_forward_kernel<Element, kRowTiles, kWidth, kQueryStays>,
                        blocks_of(units), kThreadsOfBlock,
                        Shared(nullptr, p.head_dim).memory.taken(), stream, task, units);
}

/// Rows of a tile make no difference to the bits: the larger ones read keys half as often, the
/// smaller ones are there where the larger ones leave multiprocessors idle.
template <class Element, int kWidth, bool kQueryStays>
int launch_forward(const ForwardTask<float>& task, void* stream) {
  const int64_t large = RowUnit<ForwardShared<Element, 2, kWidth>::kRows, kWidth>::count(
      task.forward.problem, output_columns(task), task.splits);
  return large >= device::multiprocessors()
             ? launch_forward<Element, 2, kWidth, kQueryStays>(task, stream)
             : launch_forward<Element, 1, kWidth, kQueryStays>(task, stream);
}

template <class Element>
int run_forward(const ForwardTask<float>& task, void* stream) {
  const bool narrow = output_columns(task) <= 64 &&
                      task.forward.problem.head_dim <= kStayingSteps * kStepOfProduct;
  const int error = narrow ? launch_forward<Element, 64, true>(task, stream)
                           : launch_forward<Element, 128, false>(task, stream);
  return error != 0 || task.splits == 1 ? error : merge_splits<Element>(task, stream);
}

}  // namespace qkv::kernels::sm80
