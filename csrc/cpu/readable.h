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

/// Operands as the kernels read them: query, key and value as they are stored, numbers of heads in
/// the dtype that sums are taken in. Where the numbers of a mask's row lie apart, it takes longer
/// to read them one by one than to copy them.
inline Operands readable(Operands x, at::ScalarType real) {
  x.query = in_rows(x.query);
  x.key = in_rows(x.key);
  x.value = in_rows(x.value);
  const bool is_broadcast = !x.attn_mask || x.attn_mask->dim() == 0 || x.attn_mask->stride(-1) == 0;
  if (!is_broadcast) x.attn_mask = in_rows(*x.attn_mask);
  if (x.alibi_slopes) x.alibi_slopes = x.alibi_slopes->to(real);
  if (x.sinks) x.sinks = x.sinks->to(real);
  return x;
}

inline ForwardResults readable(const ForwardResults& x) {
  return {in_rows(x.out), x.lse.contiguous(), in_rows(x.out_rest), x.lse_rest.contiguous()};
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
