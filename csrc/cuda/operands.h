#pragma once

#include "operands.h"
#include "problem.h"

// Tensors as the kernels of a GPU read them: half types as they are.

namespace qkv::cuda {

/// Masks are read as they are, and numbers of heads as the numbers that sums are taken in.
inline Operands readable(Operands x, at::ScalarType real) {
  x.query = with_unit_columns(x.query);
  x.key = with_unit_columns(x.key);
  x.value = with_unit_columns(x.value);
  if (x.alibi_slopes) x.alibi_slopes = x.alibi_slopes->to(real);
  if (x.sinks) x.sinks = x.sinks->to(real);
  return x;
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
