// Shapes, dtypes and strides of _attention_weights_backward, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<6> attention_weights_backward(const Operands& x, const Tensor& grad_weights,
                                          const Tensor& lse, const Tensor& lse_rest, Needs needs) {
  check_weights_backward(kWeightsBackwardOp, x, grad_weights, lse, lse_rest, needs);
  return std::tuple_cat(empty_gradients(x, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  m.impl("_attention_weights_backward", flat<&attention_weights_backward>);
}

}  // namespace

}  // namespace qkv
