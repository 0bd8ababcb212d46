// Shapes, dtypes and strides of _attention_weights, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "internal_op.h"
#include "layout.h"
#include "problem.h"

namespace qkv {

namespace {

TensorTuple<3> attention_weights(const Operands& x) {
  check_weights(kWeightsOp, x);
  check_batch_dimensions(kWeightsOp, x);
  return empty_weights(x);
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_weights", flat<&attention_weights>); }

}  // namespace

}  // namespace qkv
