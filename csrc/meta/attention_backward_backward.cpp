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
  constexpr const char* kOp = "qkv::_attention_backward_backward";
  check_operands(kOp, x);
  check_grad_outputs(kOp, x, grad_out, grad_lse);
  check_forward_results(kOp, x, out, lse, out_rest, lse_rest);
  check_tangents(kOp, x,
                 {grad_grad_query, grad_grad_key, grad_grad_value, grad_grad_attn_mask,
                  grad_grad_alibi_slopes, grad_grad_sinks});
  check_needs(kOp, x, {needs[2], needs[3], needs[4], needs[5], needs[6], needs[7]});
  return std::tuple_cat(empty_gradients_of_second(x, grad_out, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv
