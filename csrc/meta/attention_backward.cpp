// Shapes, dtypes and strides of _attention_backward, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<6> attention_backward(const Operands& x, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const ForwardResults& forward,
                                  Needs needs) {
  check_backward(kBackwardOp, x, grad_out, grad_lse, forward, needs);
  return std::tuple_cat(empty_gradients(x, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv
