// Shapes, dtypes and strides of _attention_backward_backward, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<8> attention_backward_backward(const Operands& x, const Tensor& grad_out,
                                           const OptionalTensor& grad_lse,
                                           const ForwardResults& forward,
                                           const Tangents& cotangents, NeedsOfSecond needs) {
  check_backward_backward(kBackwardBackwardOp, x, grad_out, grad_lse, forward, cotangents, needs);
  return std::tuple_cat(empty_gradients_of_second(x, grad_out, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv
