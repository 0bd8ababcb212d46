#pragma once

#include "kernels/cpu/amx_registers.h"
#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/exp_scaled.inc.h"
#include "kernels/cpu/transpose.inc.h"

// AMX multiplies matrices that lie in tiles (amx_registers.h):
//
//     C[16][16] += A[16][32] · B[16][16]          A in 16 bits, B pairs of them, C float32
//
//     C[i][j] += sum over k of A[i][2k] · B[k][j].first + A[i][2k + 1] · B[k][j].second
//
// with 16 times the multiply-adds of a vector unit in float32. Subnormal bfloat16 numbers count as
// zeros, those of float16 do not.

namespace qkv::kernels::QKV_ISA {

/// C[16][16 · columns] = A[16][32 · steps] · B[16 · steps][16 · columns], or += if it adds: up to
/// four tiles of C side by side, for which A is loaded once.
///
/// Two by two tiles of C would load a fifth less, and are not faster (Emerald Rapids).
template <class Half, int kColumns, bool kAdds>
struct TileProduct {
  using Pair = HalfPair<Half>;

  struct Left {
    const Half* data;
    int64_t row;
    int64_t step;
  };
  struct Right {
    const Pair* data;
    int64_t row;
  };

  int64_t steps;
  Left a;
  Right b;
  float* c;
  int64_t c_row;

  QKV_INLINE void multiply() const {
    static_assert(kColumns <= 4);
    const int64_t a_bytes = a.row * int64_t{sizeof(Half)};
    const int64_t b_bytes = b.row * int64_t{sizeof(Pair)};
    start<0>();
    if constexpr (kColumns > 1) start<1>();
    if constexpr (kColumns > 2) start<2>();
    if constexpr (kColumns > 3) start<3>();
    const Half* a_tile = a.data;
    const Pair* b_tile = b.data;
    for (int64_t s = 0; s < steps; ++s) {
      load_tile<kA>(a_tile, a_bytes);
      add_column<0>(b_tile, b_bytes);
      if constexpr (kColumns > 1) add_column<1>(b_tile, b_bytes);
      if constexpr (kColumns > 2) add_column<2>(b_tile, b_bytes);
      if constexpr (kColumns > 3) add_column<3>(b_tile, b_bytes);
      a_tile += a.step;
      b_tile += kTileDepth / 2 * b.row;
    }
    store_tile<0>(c, c_bytes());
    if constexpr (kColumns > 1) store_tile<1>(c + kTileRows, c_bytes());
    if constexpr (kColumns > 2) store_tile<2>(c + 2 * kTileRows, c_bytes());
    if constexpr (kColumns > 3) store_tile<3>(c + 3 * kTileRows, c_bytes());
  }

 private:
  static constexpr int kA = 4, kB = 5;

  QKV_INLINE int64_t c_bytes() const { return c_row * int64_t{sizeof(float)}; }

  template <int kColumn>
  QKV_INLINE void start() const {
    if constexpr (kAdds) {
      load_tile<kColumn>(c + kColumn * kTileRows, c_bytes());
    } else {
      set_tile_to_zero<kColumn>();
    }
  }
  template <int kColumn>
  QKV_INLINE void add_column(const Pair* b_tile, int64_t b_bytes) const {
    load_tile<kB>(b_tile + kColumn * kTileRows, b_bytes);
    multiply_add_tiles<kColumn, kA, kB>(Half{});
  }
};

}  // namespace qkv::kernels::QKV_ISA
