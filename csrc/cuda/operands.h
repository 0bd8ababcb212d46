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

/// What the reference computes to where Meta says it lies; nothing is zeros.
inline void put(const Tensor& from, const Tensor& to) {
  from.defined() ? to.copy_(from) : to.zero_();
}

}  // namespace qkv::cuda
