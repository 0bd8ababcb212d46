#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/cuda/simt/tasks.h"
#include "operands.h"

namespace qkv::cuda {

/// What the backward and its own derivative leave for each row and each head, in memory that lives
/// as long as this.
template <class T>
class SumsOfRows {
 public:
  /// Tells a task where they are.
  SumsOfRows(const Tensor& lse, const Needs& needs, kernels::simt::BackwardTask<T>& task)
      : delta_(at::empty_like(lse)) {
    auto heads = lse.sizes().vec();  // one number for each (batch.., Hq)
    heads.pop_back();
    const auto of_heads = lse.options().dtype(at::kDouble);
    task.delta = numbers_of<T>(delta_);
    if (needs[4]) {
      slope_gradient_ = at::empty_like(lse);
      slopes_ = at::empty(heads, of_heads);
      task.backward.slope_gradient_of_rows = numbers_of<T>(slope_gradient_);
      task.grad_slopes = numbers_of<double>(slopes_);
    }
    if (needs[5]) {
      sinks_ = at::empty(heads, of_heads);
      task.grad_sinks = numbers_of<double>(sinks_);
    }
  }

  /// The sums of heads, over the dimensions in which slopes and sinks are broadcast.
  void put(const Gradients& grads) const {
    if (slopes_.defined()) grads[4].copy_(slopes_.sum_to_size(grads[4].sizes()));
    if (sinks_.defined()) grads[5].copy_(sinks_.sum_to_size(grads[5].sizes()));
  }

 private:
  template <class Number>
  static Number* numbers_of(const Tensor& x) {
    return static_cast<Number*>(x.data_ptr());
  }

  Tensor delta_, slope_gradient_, slopes_, sinks_;
};

}  // namespace qkv::cuda
