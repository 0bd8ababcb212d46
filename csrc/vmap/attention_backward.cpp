#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Operands& x,
                                                              const Tensor& grad_out,
                                                              const OptionalTensor& grad_lse,
                                                              const Tensor& out, const Tensor& lse,
                                                              std::array<bool, 4> needs) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x, {grad_out, grad_lse, out, lse});
  if (!level.any()) return attention_backward_op()(x, grad_out, grad_lse, out, lse, needs);
  // Each sample has a gradient of its own, also of a mask that all of them share.
  const Operands mapped = level.unwrap(x, /*always_map_mask=*/needs[3]);
  const auto [grad_query, grad_key, grad_value, grad_mask] =
      attention_backward_op()(mapped, level.in_front(grad_out), level.in_front(grad_lse),
                              level.in_front(out), level.in_front(lse), needs);
  // A shared mask of lower rank was given dimensions of size 1 to stand in front of.
  const auto shaped_as_mask = [&] {
    auto sizes = x.attn_mask->sym_sizes().vec();
    sizes.insert(sizes.begin(), grad_mask.sym_size(0));
    return grad_mask.view_symint(sizes);
  };
  return {needs[0] ? level.wrap(grad_query) : grad_query,
          needs[1] ? level.wrap(grad_key) : grad_key,
          needs[2] ? level.wrap(grad_value) : grad_value,
          needs[3] ? level.wrap(shaped_as_mask()) : grad_mask};
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) {
  m.impl("_attention_backward", flat<&attention_backward>);
}

}  // namespace

}  // namespace qkv::vmap
