#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<8> attention_backward_backward(const Operands& x, const Tensor& grad_out,
                                           const OptionalTensor& grad_lse,
                                           const ForwardResults& forward,
                                           const Tangents& cotangents, NeedsOfSecond needs) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x, grad_out, grad_lse, forward, cotangents);
  const auto& op = attention_backward_backward_op();
  if (!level.any()) return op(x, grad_out, grad_lse, forward, cotangents, needs);
  auto grads = as_array(op(level.unwrap(x, of_operands(needs)), level.in_front(grad_out),
                           level.in_front(grad_lse), level.in_front(forward),
                           level.unwrap(x, cotangents), needs));
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
