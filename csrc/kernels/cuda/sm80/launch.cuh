#pragma once

#include "kernels/cuda/sm80/attention_backward.cuh"
#include "kernels/cuda/sm80/attention_forward.cuh"
#include "kernels/cuda/sm80/tasks.h"

// Which kernel a call runs, with how many blocks and how much shared memory. Each kernels_*.cu
// compiles this for one element type.

namespace qkv::kernels::sm80 {

template <class Element, int kRowTiles, int kWidth, bool kQueryStays>
int launch_forward(const ForwardTask<float>& task, void* stream) {
  using Shared = ForwardShared<Element, kRowTiles, kWidth>;
  const Problem<float>& p = task.forward.problem;
  const int64_t units = RowUnit<Shared::kRows, kWidth>::count(p, output_columns(task), task.splits);
  return device::launch("attention_forward_sm80",
                        attention_forward_kernel<Element, kRowTiles, kWidth, kQueryStays>,
                        blocks_of(units), kThreadsOfBlock,
                        Shared(nullptr, p.head_dim).memory.taken(), stream, task, units);
}

/// Rows of a tile make no difference to the bits: the larger ones read keys half as often, the
/// smaller ones are there where the larger ones leave multiprocessors idle or do not fit.
template <class Element, int kWidth, bool kQueryStays>
int launch_forward(const ForwardTask<float>& task, void* stream) {
  using Large = ForwardShared<Element, 2, kWidth>;
  const Problem<float>& p = task.forward.problem;
  const int64_t units = RowUnit<Large::kRows, kWidth>::count(p, output_columns(task), task.splits);
  const bool fits = Large(nullptr, p.head_dim).memory.taken() <= device::most_shared_bytes(1);
  return fits && units >= device::multiprocessors()
             ? launch_forward<Element, 2, kWidth, kQueryStays>(task, stream)
             : launch_forward<Element, 1, kWidth, kQueryStays>(task, stream);
}

template <class Element>
int run_forward(const ForwardTask<float>& task, void* stream) {
  const bool narrow =
      output_columns(task) <= 64 && task.forward.problem.head_dim <= kStayingSteps * kStepOfProduct;
  const int error = narrow ? launch_forward<Element, 64, true>(task, stream)
                           : launch_forward<Element, 128, false>(task, stream);
  return error != 0 || task.splits == 1 ? error : merge_splits<Element>(task, stream);
}

/// Two stages of the others if two such blocks fit a multiprocessor, else one.
template <class Tiles>
struct BackwardStages {
  int stages;
  int64_t bytes;

  explicit BackwardStages(const Problem<float>& p) {
    const auto bytes_of = [&](int count) {
      return Tiles(nullptr, p.head_dim, p.value_dim, count).memory.taken();
    };
    stages = bytes_of(2) <= device::most_shared_bytes(2) ? 2 : 1;
    bytes = bytes_of(stages);
  }
};

template <class Element, int kWidth>
int launch_grad_query(const BackwardTask<float>& task, void* stream) {
  const Problem<float>& p = task.backward.problem;
  const BackwardStages<BackwardTiles<Element, kWidth, false>> shared(p);
  const int64_t units = RowUnit<kOwnRows, kWidth>::count(p, p.head_dim);
  return device::launch("grad_query_sm80", grad_query_kernel<Element, kWidth>, blocks_of(units),
                        kThreadsOfBlock, shared.bytes, stream, task, units, shared.stages);
}

template <class Element, int kWidth>
int launch_grad_key(const BackwardTask<float>& task, void* stream) {
  const Problem<float>& p = task.backward.problem;
  const BackwardStages<BackwardTiles<Element, kWidth, true>> shared(p);
  const int64_t units = KeyUnit<kOwnRows, kWidth>::count(p, widest_gradient(p));
  return device::launch("grad_key_sm80", grad_key_kernel<Element, kWidth>, blocks_of(units),
                        kThreadsOfBlock, shared.bytes, stream, task, units, shared.stages);
}

template <class Element>
int run_backward(const BackwardTask<float>& task, void* stream) {
  const Problem<float>& p = task.backward.problem;
  int error = 0;
  if (needs_grad_query(task.backward)) {
    error = p.head_dim <= 64 ? launch_grad_query<Element, 64>(task, stream)
                             : launch_grad_query<Element, 128>(task, stream);
  }
  if (error == 0 && needs_grad_key(task.backward)) {
    error = widest_gradient(p) <= 64 ? launch_grad_key<Element, 64>(task, stream)
                                     : launch_grad_key<Element, 128>(task, stream);
  }
  return error;
}

}  // namespace qkv::kernels::sm80
