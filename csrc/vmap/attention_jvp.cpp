#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<2> attention_jvp(const Operands& x, const Tensor& out, const Tensor& lse,
                             const Tensor& out_rest, const Tensor& lse_rest,
                             const OptionalTensor& query_t, const OptionalTensor& key_t,
                             const OptionalTensor& value_t, const OptionalTensor& attn_mask_t,
                             const OptionalTensor& alibi_slopes_t, const OptionalTensor& sinks_t) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x, {out, lse, out_rest, lse_rest, query_t, key_t, value_t, attn_mask_t,
                        alibi_slopes_t, sinks_t});
  if (!level.any()) {
    return attention_jvp_op()(x, out, lse, out_rest, lse_rest, query_t, key_t, value_t, attn_mask_t,
                              alibi_slopes_t, sinks_t);
  }
  const Tangents t =
      level.unwrap(x, {query_t, key_t, value_t, attn_mask_t, alibi_slopes_t, sinks_t});
  const auto [out_t, lse_t] = attention_jvp_op()(
      level.unwrap(x), level.in_front(out), level.in_front(lse), level.in_front(out_rest),
      level.in_front(lse_rest), t[0], t[1], t[2], t[3], t[4], t[5]);
  return {level.wrap(out_t), level.wrap(lse_t)};
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv::vmap
