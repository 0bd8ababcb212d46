#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "cuda/stream.h"
#include "kernels/cuda/simt/tasks.h"
#include "kernels/cuda/sm80/tasks.h"
#include "operands.h"

namespace qkv::cuda {

/// The lse, and what rounding took from it, for derivatives, which compute scores tile by tile. It
/// must come from the same scores to the bit: those of 1e6, summed in another order, differ by 1/16
/// or more, and the weights exp(S - lse) of a row would not add up to 1. The forwards of few rows
/// and of tensor cores computed other ones; lse is computed again then.
template <class T>
class LseOfTiles {
 public:
  LseOfTiles(const char* op, const kernels::Problem<T>& problem, const ForwardResults& forward,
             const Stream& stream)
      : lse_(forward.lse), lse_rest_(forward.lse_rest) {
    if (!kernels::sm80::takes_forward(problem) &&
        kernels::simt::forward_has_scores_of_derivatives(problem)) {
      return;
    }
    lse_ = at::empty_like(forward.lse);
    lse_rest_ = at::empty_like(forward.lse_rest);
    kernels::simt::ForwardTask<T> task{};
    task.forward.problem = problem;
    task.forward.lse = static_cast<T*>(lse_.data_ptr());
    task.forward.lse_rest = static_cast<T*>(lse_rest_.data_ptr());
    task.splits = kernels::simt::forward_splits(problem);
    const Tensor partial = at::empty({kernels::simt::forward_partial_size(task)}, lse_.options());
    task.forward.partial = static_cast<T*>(partial.data_ptr());
    check(op, kernels::simt::attention_forward(task, stream.get()));
  }

  /// Sets lse in the params of a derivative, which must not outlive this.
  template <class Params>
  void set_lse(Params& params) const {
    params.lse = static_cast<const T*>(lse_.const_data_ptr());
    params.lse_rest = static_cast<const T*>(lse_rest_.const_data_ptr());
  }

 private:
  Tensor lse_, lse_rest_;
};

}  // namespace qkv::cuda
