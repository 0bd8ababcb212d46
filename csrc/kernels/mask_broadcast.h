#pragma once

#include "kernels/params.h"

// An additive mask may be broadcast over some of the batch dimensions (its stride is 0 there); its
// gradient is summed over them.
//
// QKV_ISA names the namespace this is compiled into, so that no two instruction sets share code.

namespace qkv::kernels::QKV_ISA {

/// How many batch elements the mask itself has.
template <class T>
QKV_INLINE int64_t batches_of_mask(const Problem<T>& p, const Operand<T>& mask) {
  int64_t batches = 1;
  for (int d = 0; d < p.batch_rank; ++d) {
    if (mask.batch_stride[d] != 0) batches *= p.batch_size[d];
  }
  return batches;
}

/// The batch element at `kept` in the mask's own batch dimensions and at `summed` in the others.
template <class T>
QKV_INLINE int64_t batch_of_mask(const Problem<T>& p, const Operand<T>& mask, int64_t kept,
                                 int64_t summed) {
  int64_t number = 0, step = 1;
  for (int d = p.batch_rank - 1; d >= 0; --d) {
    int64_t& left = mask.batch_stride[d] != 0 ? kept : summed;
    number += left % p.batch_size[d] * step;
    left /= p.batch_size[d];
    step *= p.batch_size[d];
  }
  return number;
}

}  // namespace qkv::kernels::QKV_ISA
