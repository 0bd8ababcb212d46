// Shapes, dtypes and strides of _attention_forward, for tracing.

#include <torch/library.h>

#include "checks.h"
#include "layout.h"
#include "problem.h"

namespace qkv {

namespace {

TensorTuple<4> attention_forward(const Operands& x) {
  constexpr const char* kOp = "qkv::_attention_forward";
  check_operands(kOp, x);
  check_batch_dimensions(kOp, x);
  return empty_forward_results(x);
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv
