// _attention_jvp on CUDA: by the formulas of reference_derivatives.cpp, in memory for all M x N
// scores. There is no kernel yet.

#include <torch/library.h>

#include "checks.h"
#include "cuda/operands.h"
#include "cuda/stream.h"
#include "environment.h"
#include "layout.h"
#include "reference.h"

namespace qkv::cuda {

namespace {

TensorTuple<2> attention_jvp(const Operands& x, const Tensor& out, const Tensor& lse,
                             const Tensor& out_rest, const Tensor& lse_rest,
                             const OptionalTensor& query_t, const OptionalTensor& key_t,
                             const OptionalTensor& value_t, const OptionalTensor& attn_mask_t,
                             const OptionalTensor& alibi_slopes_t, const OptionalTensor& sinks_t) {
  const Tangents tangents{query_t, key_t, value_t, attn_mask_t, alibi_slopes_t, sinks_t};
  check_jvp("qkv::_attention_jvp", x, out, lse, out_rest, lse_rest, tangents);
  report_fallback("qkv::attention", "forward mode has no kernel for CUDA yet");
  const Tensor out_t = empty_output(x), lse_t = empty_logsumexp(x);
  const auto [moved_out, moved_lse] = reference::attention_jvp(x, tangents);
  put(moved_out, out_t);
  put(moved_lse, lse_t);
  return {out_t, lse_t};
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv::cuda
