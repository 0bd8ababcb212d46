// Shapes, dtypes and strides of _attention_backward, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<6> attention_backward(const Operands& x, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const Tensor& out,
                                  const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
                                  Needs needs) {
  check_backward(kBackwardOp, x, grad_out, grad_lse, out, lse, out_rest, lse_rest, needs);
  return std::tuple_cat(empty_gradients(x, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv
