#pragma once

#include <ATen/core/Tensor.h>

#include "operands.h"
#include "problem.h"

// Tensors as the kernels of a CPU read them.

namespace qkv::cpu {

/// x in another dtype; dimensions in which it is broadcast still are.
inline Tensor converted(const Tensor& x, at::ScalarType type) {
  if (x.scalar_type() == type) return x;
  Tensor once = x;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.stride(d) == 0 && x.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  return once.to(type).expand(x.sizes());
}

/// A tensor as the kernels read it: bfloat16 and float16 as float32, each row in one piece.
inline Tensor readable(const Tensor& x, at::ScalarType real) {
  return with_unit_columns(converted(x, real));
}

/// Masks are read as they are, query, key and value as they are stored.
inline Operands readable(Operands x, at::ScalarType real) {
  x.query = with_unit_columns(x.query);
  x.key = with_unit_columns(x.key);
  x.value = with_unit_columns(x.value);
  if (x.alibi_slopes) x.alibi_slopes = x.alibi_slopes->to(real);
  if (x.sinks) x.sinks = x.sinks->to(real);
  return x;
}

/// An output with what rounding took from it.
inline Tensor exact_output(const Tensor& out, const Tensor& out_rest, at::ScalarType real) {
  const Tensor x = readable(out, real);
  return has_16_bits(out) ? with_unit_columns(x.add(out_rest)) : x;
}

/// Tangents as the kernels read them: those of query, key and value as they are stored.
inline Tangents readable(Tangents tangents, at::ScalarType real) {
  for (size_t i = 0; i < 3; ++i) {
    if (tangents[i]) tangents[i] = with_unit_columns(*tangents[i]);
  }
  for (size_t i = 3; i < tangents.size(); ++i) {
    if (tangents[i]) tangents[i] = converted(*tangents[i], real);
  }
  return tangents;
}

}  // namespace qkv::cpu
