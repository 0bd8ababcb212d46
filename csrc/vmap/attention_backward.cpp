#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<6> attention_backward(const Operands& x, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const ForwardResults& forward,
                                  Needs needs) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x, grad_out, grad_lse, forward);
  if (!level.any()) return attention_backward_op()(x, grad_out, grad_lse, forward, needs);
  Gradients grads =
      as_array(attention_backward_op()(level.unwrap(x, needs), level.in_front(grad_out),
                                       level.in_front(grad_lse), level.in_front(forward), needs));
  const auto inputs = x.tensors();
  for (size_t i = 0; i < grads.size(); ++i) {
    if (needs[i]) grads[i] = level.wrap_gradient(grads[i], *inputs[i]);
  }
  return std::tuple_cat(grads);
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) {
  m.impl("_attention_backward", flat<&attention_backward>);
}

}  // namespace

}  // namespace qkv::vmap
