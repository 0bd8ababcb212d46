// Shapes, dtypes and strides of _attention_backward_backward, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<8> attention_backward_backward(
    const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
    const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
    const OptionalTensor& grad_grad_query, const OptionalTensor& grad_grad_key,
    const OptionalTensor& grad_grad_value, const OptionalTensor& grad_grad_attn_mask,
    const OptionalTensor& grad_grad_alibi_slopes, const OptionalTensor& grad_grad_sinks,
    NeedsOfSecond needs) {
  check_backward_backward(kBackwardBackwardOp, x, grad_out, grad_lse, out, lse, out_rest, lse_rest,
                          {grad_grad_query, grad_grad_key, grad_grad_value, grad_grad_attn_mask,
                           grad_grad_alibi_slopes, grad_grad_sinks},
                          needs);
  return std::tuple_cat(empty_gradients_of_second(x, grad_out, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv
