#pragma once

#include <stdint.h>

// Random bits that are a function of where they are used (Philox4x32-10: Salmon, Moraes, Dror and
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). What dropout drops is therefore
// the same in forward and backward, on every device and however the work is cut.
//
//     weight (i, j) of head h:   counter (j / 8, i, h, 0)   key seed[b]
//     -> 128 bits = 16 bits for each of the keys 8·(j / 8) .. + 7, lowest first
//
// QKV_ISA names the namespace this is compiled into, so that no two instruction sets share code.

namespace qkv::kernels::QKV_ISA {

/// kLanes counters at once, each replaced by its random words.
template <int kLanes>
inline void philox(uint32_t (&c0)[kLanes], uint32_t (&c1)[kLanes], uint32_t (&c2)[kLanes],
                   uint32_t (&c3)[kLanes], uint64_t key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < kLanes; ++l) {
      const uint64_t a = kMultiplier0 * c0[l], b = kMultiplier1 * c2[l];
      c0[l] = static_cast<uint32_t>(b >> 32) ^ c1[l] ^ k0;
      c1[l] = static_cast<uint32_t>(b);
      c2[l] = static_cast<uint32_t>(a >> 32) ^ c3[l] ^ k1;
      c3[l] = static_cast<uint32_t>(a);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
}

}  // namespace qkv::kernels::QKV_ISA
