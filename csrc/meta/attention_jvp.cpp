// Shapes, dtypes and strides of _attention_jvp, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv {

namespace {

TensorTuple<2> attention_jvp(const Operands& x, const ForwardResults& forward,
                             const Tangents& tangents) {
  check_jvp(kJvpOp, x, forward, tangents);
  return {empty_output(x), empty_logsumexp(x)};
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv
