#pragma once

#include <stdint.h>

#include "kernels/params.h"

// Random bits that are a function of where they are used (Philox4x32-10: Salmon, Moraes, Dror and
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). What dropout drops is therefore
// the same in forward and backward, on every device and however the work is cut.
//
//     weight (i, j) of head h:   counter (j / 8, i, h, 0)   key seed[b]
//     -> 128 bits = 16 bits for each of the keys 8·(j / 8) .. + 7, lowest first
//
// QKV_ISA names the namespace this is compiled into, so that no two instruction sets share code.

namespace qkv::kernels::QKV_ISA {

/// What a weight that stays is multiplied with: 1 / (1 - p).
template <class T>
QKV_INLINE T dropout_scale(const Dropout& dropout) {
  return dropout.threshold == 65536 ? T(0) : T(65536) / static_cast<T>(65536 - dropout.threshold);
}

/// Several counters at once, each replaced by its random words. Words is a vector of 32-bit words
/// with set, exclusive_or and multiply (to the high and the low halves of the products).
template <class Words>
QKV_INLINE void philox(typename Words::Vector (&c)[4], uint64_t key) {
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    typename Words::Vector high_a, low_a, high_b, low_b;
    Words::multiply(c[0], 0xD2511F53, high_a, low_a);
    Words::multiply(c[2], 0xCD9E8D57, high_b, low_b);
    c[0] = Words::exclusive_or(high_b, c[1], Words::set(k0));
    c[1] = low_b;
    c[2] = Words::exclusive_or(high_a, c[3], Words::set(k1));
    c[3] = low_a;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
}

}  // namespace qkv::kernels::QKV_ISA
