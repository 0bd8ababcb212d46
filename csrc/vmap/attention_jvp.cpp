#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<2> attention_jvp(const Operands& x, const ForwardResults& forward,
                             const Tangents& tangents) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x, forward, tangents);
  if (!level.any()) return attention_jvp_op()(x, forward, tangents);
  // A tangent has a gradient of its operand's shape: both are mapped, or none.
  const Needs mapped = level.mapped(x, tangents);
  const auto [out_t, lse_t] = attention_jvp_op()(level.unwrap(x, mapped), level.in_front(forward),
                                                 level.unwrap(x, tangents, mapped));
  return {level.wrap(out_t), level.wrap(lse_t)};
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv::vmap
