#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<6> attention_weights_backward(const Operands& x, const Tensor& grad_weights,
                                          const Tensor& lse, const Tensor& lse_rest, Needs needs) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x, grad_weights, lse, lse_rest);
  if (!level.any()) return attention_weights_backward_op()(x, grad_weights, lse, lse_rest, needs);
  Gradients grads = as_array(
      attention_weights_backward_op()(level.unwrap(x, needs), level.in_front(grad_weights),
                                      level.in_front(lse), level.in_front(lse_rest), needs));
  const auto inputs = x.tensors();
  for (size_t i = 0; i < grads.size(); ++i) {
    if (needs[i]) grads[i] = level.wrap_gradient(grads[i], *inputs[i]);
  }
  return std::tuple_cat(grads);
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) {
  m.impl("_attention_weights_backward", flat<&attention_weights_backward>);
}

}  // namespace

}  // namespace qkv::vmap
