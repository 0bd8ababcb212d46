// Shapes, dtypes and strides of _attention_backward, for tracing.

#include <torch/library.h>

#include "layout.h"

namespace qkv {

namespace {

TensorTuple<6> attention_backward(const Operands& x, const Tensor& /*grad_out*/,
                                  const OptionalTensor& /*grad_lse*/, const Tensor& /*out*/,
                                  const Tensor& /*lse*/, const Tensor& /*out_rest*/,
                                  const Tensor& /*lse_rest*/, Needs needs) {
  return std::tuple_cat(empty_gradients(x, needs));
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv
