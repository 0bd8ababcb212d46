#pragma once

#include "operands.h"
#include "problem.h"

// Tensors as the kernels of a GPU read them: half types as they are.

namespace qkv::cuda {

/// x, or a copy if its last dimension is strided, which the kernels cannot read in place.
/// Dimensions in which it is broadcast still are.
inline Tensor with_unit_columns(const Tensor& x) {
  if (x.stride(-1) == 1 || x.size(-1) <= 1) return x;
  return without_repetitions(x, x.dim() - 1).contiguous().expand(x.sizes());
}

/// Operands as kernels read them: masks as they are, query, key and value as they are stored,
/// numbers of heads in the dtype that sums are taken in.
inline Operands readable(Operands x, at::ScalarType real) {
  x.query = with_unit_columns(x.query);
  x.key = with_unit_columns(x.key);
  x.value = with_unit_columns(x.value);
  if (x.alibi_slopes) x.alibi_slopes = x.alibi_slopes->to(real);
  if (x.sinks) x.sinks = x.sinks->to(real);
  return x;
}

inline ForwardResults readable(const ForwardResults& x) {
  return {with_unit_columns(x.out), x.lse.contiguous(), with_unit_columns(x.out_rest),
          x.lse_rest.contiguous()};
}

inline Tangents readable(Tangents tangents, at::ScalarType real) {
  for (size_t i = 0; i < 3; ++i) {  // query, key, value
    if (tangents[i]) tangents[i] = with_unit_columns(*tangents[i]);
  }
  for (size_t i = 4; i < tangents.size(); ++i) {  // alibi_slopes, sinks
    if (tangents[i]) tangents[i] = tangents[i]->to(real);
  }
  return tangents;
}

}  // namespace qkv::cuda
