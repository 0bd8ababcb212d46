// Shapes, dtypes and strides of _attention_backward, for tracing.

#include <torch/library.h>

#include "layout.h"

namespace qkv {

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Operands& x, const Tensor& /*grad_out*/, const OptionalTensor& /*grad_lse*/,
    const Tensor& /*out*/, const Tensor& /*lse*/, std::array<bool, 4> needs) {
  const auto [grad_query, grad_key, grad_value, grad_mask] = empty_gradients(x, needs);
  return {grad_query, grad_key, grad_value, grad_mask};
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv
