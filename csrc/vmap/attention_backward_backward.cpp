#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<8> attention_backward_backward(
    const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
    const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
    const OptionalTensor& grad_grad_query, const OptionalTensor& grad_grad_key,
    const OptionalTensor& grad_grad_value, const OptionalTensor& grad_grad_attn_mask,
    const OptionalTensor& grad_grad_alibi_slopes, const OptionalTensor& grad_grad_sinks,
    NeedsOfSecond needs) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Tangents cotangents = {grad_grad_query,     grad_grad_key,          grad_grad_value,
                               grad_grad_attn_mask, grad_grad_alibi_slopes, grad_grad_sinks};
  std::vector<OptionalTensor> others = {grad_out, grad_lse, out, lse, out_rest, lse_rest};
  others.insert(others.end(), cotangents.begin(), cotangents.end());
  const Level level(x, others);
  const auto call = [&](const Operands& operands, const auto& of, const Tangents& c) {
    return as_array(attention_backward_backward_op()(operands, of(grad_out), of(grad_lse), of(out),
                                                     of(lse), of(out_rest), of(lse_rest), c[0],
                                                     c[1], c[2], c[3], c[4], c[5], needs));
  };
  if (!level.any()) {
    return std::tuple_cat(call(
        x, [](const auto& t) { return t; }, cotangents));
  }
  auto grads = call(
      level.unwrap(x, of_operands(needs)), [&](const auto& t) { return level.in_front(t); },
      level.unwrap(x, cotangents));
  const auto inputs = x.tensors();
  for (size_t i = 0; i < grads.size(); ++i) {
    if (needs[i]) {
      grads[i] = i < 2 ? level.wrap(grads[i]) : level.wrap_gradient(grads[i], *inputs[i - 2]);
    }
  }
  return std::tuple_cat(grads);
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv::vmap
