#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/rows.h"
#include "operands.h"
#include "problem.h"

// Tensors as the kernels of a CPU read them.

namespace qkv::cpu {

/// x in another dtype; dimensions in which it is broadcast still are.
inline Tensor converted(const Tensor& x, at::ScalarType type) {
  if (x.scalar_type() == type) return x;
  return without_repetitions(x, x.dim()).to(type).expand(x.sizes());
}

/// An output with what rounding took from it.
inline Tensor exact_output(const Tensor& out, const Tensor& out_rest, at::ScalarType real) {
  const Tensor x = converted(out, real);
  return in_rows(has_16_bits(out) ? x.add(out_rest) : x);
}

/// Tangents as the kernels read them: those of query, key and value as they are stored.
inline Tangents readable(Tangents tangents, at::ScalarType real) {
  for (size_t i = 0; i < 3; ++i) {
    if (tangents[i]) tangents[i] = in_rows(*tangents[i]);
  }
  for (size_t i = 3; i < tangents.size(); ++i) {
    if (tangents[i]) tangents[i] = converted(*tangents[i], real);
  }
  return tangents;
}

}  // namespace qkv::cpu
