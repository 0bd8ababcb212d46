// _attention_backward_backward on CUDA: by the formulas of reference_derivatives.cpp, in memory for
// all M x N scores. There is no kernel yet.

#include <torch/library.h>

#include "checks.h"
#include "cuda/operands.h"
#include "cuda/stream.h"
#include "environment.h"
#include "layout.h"
#include "reference.h"

namespace qkv::cuda {

namespace {

TensorTuple<8> attention_backward_backward(
    const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
    const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
    const OptionalTensor& grad_grad_query, const OptionalTensor& grad_grad_key,
    const OptionalTensor& grad_grad_value, const OptionalTensor& grad_grad_attn_mask,
    const OptionalTensor& grad_grad_alibi_slopes, const OptionalTensor& grad_grad_sinks,
    NeedsOfSecond needs) {
  const Tangents cotangents{grad_grad_query,     grad_grad_key,          grad_grad_value,
                            grad_grad_attn_mask, grad_grad_alibi_slopes, grad_grad_sinks};
  check_backward_backward("qkv::_attention_backward_backward", x, grad_out, grad_lse, out, lse,
                          out_rest, lse_rest, cotangents, needs);
  report_fallback("qkv::attention", "the double backward has no kernel for CUDA yet");
  const std::array<Tensor, 8> results = empty_gradients_of_second(x, grad_out, needs);
  const auto grads =
      as_array(reference::attention_backward_backward(x, grad_out, grad_lse, cotangents, needs));
  for (size_t i = 0; i < results.size(); ++i) {
    if (needs[i]) put(grads[i], results[i]);
  }
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv::cuda
