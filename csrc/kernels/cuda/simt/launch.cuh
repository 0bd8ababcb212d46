#pragma once

#include "kernels/cuda/simt/attention_backward.cuh"
#include "kernels/cuda/simt/attention_forward.cuh"
#include "kernels/cuda/simt/attention_jvp.cuh"
#include "kernels/cuda/simt/few_rows.cuh"
#include "kernels/cuda/simt/head_gradient.cuh"
#include "kernels/cuda/simt/mask_gradient_t.cuh"
#include "kernels/cuda/simt/merge.cuh"

// Which kernels a call runs, in which order, with how many blocks and how much shared memory. Each
// kernels_*.cu compiles this for one element type.

namespace qkv::kernels::simt {

/// What the oldest architecture, sm_75, has of shared memory for a block.
constexpr int64_t kSharedBytes = 64 << 10;

/// What a block takes of it.
template <class Shared>
constexpr int64_t shared_bytes() {
  constexpr int64_t kBytes = Shared(nullptr).memory.taken();
  static_assert(kBytes <= kSharedBytes, "not every architecture can launch it");
  return kBytes;
}

/// How many stages of Q stay in a block's shared memory, all that there are or none, and what the
/// block then takes of it.
struct StayingQuery {
  int64_t stages;
  int64_t bytes;
};

/// They stay if two such blocks fit a multiprocessor.
template <class Shared, class T>
StayingQuery staying_query(int64_t head_dim) {
  constexpr int64_t kWithout = shared_bytes<Shared>(), kWithOne = Shared(nullptr, 1).memory.taken();
  const int64_t stages = stages_of<T>(head_dim);
  const int64_t bytes = kWithOne + (stages - 1) * kSideStage<T> * static_cast<int64_t>(sizeof(T));
  const bool stays = stages != 0 && bytes <= device::most_shared_bytes(2);
  return stays ? StayingQuery{stages, bytes} : StayingQuery{0, kWithout};
}

/// Rows of the largest tile of the kernel for few rows, that shared memory holds.
template <class T>
constexpr int kMostFewRows = 32 / static_cast<int>(sizeof(T));

/// The widest queries that it takes.
constexpr int64_t kWidestOfFewRows = 512;

/// Rows of its tiles, of which there may be some; 0: there are too many rows, or queries too wide.
template <class T>
int few_rows_of_tile(const Problem<T>& p) {
  const int64_t rows = rows_of_kv_head(p);
  if (rows > kMostFewRowsOfHead || p.head_dim > kWidestOfFewRows) return 0;
  return rows == 1 ? 1 : rows <= 4 ? 4 : kMostFewRows<T>;
}

template <class T>
int64_t forward_tiles(const Problem<T>& p) {
  const int of_tile = few_rows_of_tile(p);
  return ceil_divide(rows_of_kv_head(p), of_tile != 0 ? of_tile : kOwns);
}

/// Of sizes alone, so that bits do not depend on the batch; ranges of at least 512 keys, and no
/// more blocks of a head than kMostSplits.
template <class T>
int64_t number_of_splits(const Problem<T>& p) {
  const int64_t wanted = kMostSplits / forward_tiles(p), possible = p.keys / 512;
  const int64_t splits = wanted < possible ? wanted : possible;
  return splits < 1 ? 1 : splits;
}

template <class Element, int kColumns>
int launch_forward(const ForwardTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  constexpr int kOwn = kMostOwn<T>;
  const Problem<T>& p = task.forward.problem;
  const int64_t units =
      RowUnit<kOwns, kSide * kColumns>::count(p, output_columns(task), task.splits);
  const auto query = staying_query<ForwardShared<T, kOwn, kColumns>, T>(p.head_dim);
  return device::launch("attention_forward", attention_forward_kernel<Element, kOwn, kColumns>,
                        blocks_of(units), kThreadsOfTile<kOwn>, query.bytes, stream, task, units,
                        query.stages);
}

template <class Element, int kRows>
int launch_few_rows(const ForwardTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  const Problem<T>& p = task.forward.problem;
  using Shared = FewRowsShared<T, kRows>;
  constexpr int64_t kWithoutQuery = Shared(nullptr, 0).memory.taken();
  constexpr int64_t kOfColumn = kRows * sizeof(T);
  static_assert(kWithoutQuery + kWidestOfFewRows * kOfColumn <= kSharedBytes);
  const int64_t units = RowUnit<kRows, kWarpColumns>::count(p, p.value_dim, task.splits);
  return device::launch("few_rows", few_rows_kernel<Element, kRows>, blocks_of(units), kThreads,
                        kWithoutQuery + query_step<Element>(p.head_dim) * kOfColumn, stream, task,
                        units);
}

template <class Element>
int merge_splits(const ForwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.forward.problem;
  const int64_t rows = p.batch * p.query_heads * p.queries;
  return device::launch("merge_forward", merge_forward_kernel<Element>,
                        blocks_of(ceil_divide(rows, kWarps)), kThreads, 0, stream, task, rows);
}

template <class Element>
int run_forward(const ForwardTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  const Problem<T>& p = task.forward.problem;
  int error = 0;
  switch (output_columns(task) == 0 ? 0 : few_rows_of_tile(p)) {
    case 1:
      error = launch_few_rows<Element, 1>(task, stream);
      break;
    case 4:
      error = launch_few_rows<Element, 4>(task, stream);
      break;
    case 8:
      if constexpr (kMostFewRows<T> == 8) error = launch_few_rows<Element, 8>(task, stream);
      break;
    default:
      error = output_columns(task) <= 64 ? launch_forward<Element, 4>(task, stream)
                                         : launch_forward<Element, 8>(task, stream);
  }
  return error != 0 || task.splits == 1 ? error : merge_splits<Element>(task, stream);
}

template <class Element, int kOwn, int kColumns>
int launch_grad_query(const BackwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.backward.problem;
  const int64_t units = RowUnit<kOwns, kSide * kColumns>::count(p, p.head_dim);
  return device::launch("grad_query", grad_query_kernel<Element, kOwn, kColumns>, blocks_of(units),
                        kThreadsOfTile<kOwn>,
                        shared_bytes<BackwardShared<Real<Element>, kColumns>>(), stream, task,
                        units);
}

template <class Element, int kOwn, int kColumns>
int launch_grad_key(const BackwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.backward.problem;
  const int64_t units = KeyUnit<kOwns, kSide * kColumns>::count(p, widest_gradient(p));
  return device::launch(
      "grad_key", grad_key_kernel<Element, kOwn, kColumns>, blocks_of(units), kThreadsOfTile<kOwn>,
      shared_bytes<BackwardShared<Real<Element>, kColumns>>(), stream, task, units);
}

template <class Element>
int launch_delta(const BackwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.backward.problem;
  const int64_t rows = p.batch * p.query_heads * p.queries;
  return device::launch("delta", delta_kernel<Element>, blocks_of(ceil_divide(rows, kWarps)),
                        kThreads, 0, stream, task, rows);
}

template <class Element>
int launch_head_gradient(const BackwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.backward.problem;
  const int64_t units = p.batch * p.query_heads;
  return device::launch("head_gradient", head_gradient_kernel<Element>, blocks_of(units), kThreads,
                        kThreads * sizeof(double), stream, task, units);
}

template <class Element>
int run_option_gradients(const BackwardTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  int error = 0;
  if (task.backward.grad_mask.data != nullptr) {
    const int64_t units = MaskUnits::of(task.backward.problem, task.backward.grad_mask).count();
    error =
        device::launch("mask_gradient", mask_gradient_kernel<Element>, blocks_of(units), kThreads,
                       shared_bytes<MaskGradientShared<T, BackwardRows<T>>>(), stream, task, units);
  }
  if (error == 0 && (task.grad_slopes != nullptr || task.grad_sinks != nullptr)) {
    error = launch_head_gradient<Element>(task, stream);
  }
  return error;
}

template <class Element>
int run_backward(const BackwardTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  int error = launch_delta<Element>(task, stream);
  if (error == 0 && needs_grad_query(params)) {
    error = p.head_dim <= 64 ? launch_grad_query<Element, kMostOwn<T>, 4>(task, stream)
                             : launch_grad_query<Element, kMostOwn<T>, 8>(task, stream);
  }
  if (error == 0 && needs_grad_key(params)) {
    error = widest_gradient(p) <= 64 ? launch_grad_key<Element, kMostOwn<T>, 4>(task, stream)
                                     : launch_grad_key<Element, kLeastOwn, 8>(task, stream);
  }
  return error != 0 ? error : run_option_gradients<Element>(task, stream);
}

/// 1/16 of the columns that a block of second order and forward mode computes at most: registers
/// hold no more.
template <class T>
constexpr int kMostTangentColumns = 32 / static_cast<int>(sizeof(T));

template <class Element, int kColumns>
int launch_jvp(const JvpTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  const Problem<T>& p = task.jvp.problem;
  const int64_t units = RowUnit<kOwns, kSide * kColumns>::count(p, p.value_dim);
  return device::launch("attention_jvp", attention_jvp_kernel<Element, kColumns>, blocks_of(units),
                        kThreads, shared_bytes<JvpShared<T, kColumns>>(), stream, task, units);
}

template <class Element>
int run_jvp(const JvpTask<Real<Element>>& task, void* stream) {
  constexpr int kMost = kMostTangentColumns<Real<Element>>;
  return task.jvp.problem.value_dim <= 64 ? launch_jvp<Element, 4>(task, stream)
                                          : launch_jvp<Element, kMost>(task, stream);
}

template <class Element, int kColumns>
int launch_grad_query_t(const BackwardBackwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.backward.backward.problem;
  const int64_t units = RowUnit<kOwns, kSide * kColumns>::count(p, p.head_dim);
  return device::launch("grad_query_t", grad_query_t_kernel<Element, kColumns>, blocks_of(units),
                        kThreads, shared_bytes<BackwardTangentShared<Real<Element>, kColumns>>(),
                        stream, task, units);
}

template <class Element, int kColumns>
int launch_grad_key_t(const BackwardBackwardTask<Real<Element>>& task, void* stream) {
  const auto& p = task.backward.backward.problem;
  const int64_t units = KeyUnit<kOwns, kSide * kColumns>::count(p, widest_gradient(p));
  return device::launch("grad_key_t", grad_key_t_kernel<Element, kColumns>, blocks_of(units),
                        kThreads, shared_bytes<BackwardTangentShared<Real<Element>, kColumns>>(),
                        stream, task, units);
}

template <class Element>
int run_backward_backward(const BackwardBackwardTask<Real<Element>>& task, void* stream) {
  using T = Real<Element>;
  const BackwardTask<T>& backward = task.backward;
  const BackwardParams<T>& params = backward.backward;
  const Problem<T>& p = params.problem;
  constexpr int kMost = kMostTangentColumns<T>;
  // delta' is as delta, but of O' and without dLSE.
  BackwardTask<T> of_tangent = backward;
  of_tangent.backward.out = task.out_t;
  of_tangent.backward.out_rest = task.out_t_rest;
  of_tangent.backward.grad_lse = nullptr;
  of_tangent.delta = task.delta_t;
  int error = launch_delta<Element>(backward, stream);
  if (error == 0) error = launch_delta<Element>(of_tangent, stream);
  if (error == 0 && needs_grad_query(params)) {
    error = p.head_dim <= 64 ? launch_grad_query_t<Element, 4>(task, stream)
                             : launch_grad_query_t<Element, kMost>(task, stream);
  }
  if (error == 0 && needs_grad_key(params)) {
    error = widest_gradient(p) <= 64 ? launch_grad_key_t<Element, 4>(task, stream)
                                     : launch_grad_key_t<Element, kMost>(task, stream);
  }
  if (error == 0 && params.grad_mask.data != nullptr) {
    const int64_t units = MaskUnits::of(p, params.grad_mask).count();
    error = device::launch("mask_gradient_t", mask_gradient_t_kernel<Element>, blocks_of(units),
                           kThreads, shared_bytes<MaskGradientShared<T, BackwardTangentRows<T>>>(),
                           stream, task, units);
  }
  if (error == 0 && backward.grad_slopes != nullptr) {
    BackwardTask<T> of_slopes = backward;  // sums of rows, as in the backward
    of_slopes.grad_sinks = nullptr;
    error = launch_head_gradient<Element>(of_slopes, stream);
  }
  if (error == 0 && backward.grad_sinks != nullptr) {
    const int64_t units = p.batch * p.query_heads;
    error = device::launch("sink_gradient_t", sink_gradient_t_kernel<Element>, blocks_of(units),
                           kThreads, kThreads * sizeof(double), stream, task, units);
  }
  return error;
}

}  // namespace qkv::kernels::simt
