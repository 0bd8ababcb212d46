// Shapes, dtypes and strides of _attention_jvp, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<2> attention_jvp(const Operands& x, const Tensor& out, const Tensor& lse,
                             const Tensor& out_rest, const Tensor& lse_rest,
                             const OptionalTensor& query_t, const OptionalTensor& key_t,
                             const OptionalTensor& value_t, const OptionalTensor& attn_mask_t,
                             const OptionalTensor& alibi_slopes_t, const OptionalTensor& sinks_t) {
  check_jvp(kJvpOp, x, out, lse, out_rest, lse_rest,
            {query_t, key_t, value_t, attn_mask_t, alibi_slopes_t, sinks_t});
  return {empty_output(x), empty_logsumexp(x)};
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv
