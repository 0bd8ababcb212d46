#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/forward_tile.inc.h"

// What the forward tiles that multiply bfloat16 have in common: query rows and weights as pairs,
// rows in lanes.
//
//     query_t[d / 2][row] = (q[row][d], q[row][d + 1])
//     weights[k / 2][row] = (w[k][row], w[k + 1][row]), rounded to bfloat16

namespace qkv::kernels::QKV_ISA {

/// With few keys there is little to win, and the rounding of few weights does not average out.
inline bool multiplies_in_bfloat16(const Problem<float>& p) {
  return p.head_dim % 2 == 0 && p.head_dim > 0 && p.keys >= kForwardBlockKeys &&
         rows_of_kv_head(p) > kFewRows<float>;
}

/// What Source::prepare left for the key/value head of a tile.
template <class Source>
inline void* prepared_of_head(const ForwardParams<float>& params,
                              const RowTile<Source::kRows>& tile) {
  const int64_t head = tile.batch_number * params.problem.kv_heads + tile.kv_head;
  return static_cast<char*>(params.prepared) + head * Source::prepared_bytes(params.problem);
}

/// Two numbers that lie side by side.
QKV_INLINE const BFloat16Pair* in_pairs(const BFloat16* x) {
  return reinterpret_cast<const BFloat16Pair*>(x);
}

/// The size of query_t: zeros fill it up to a multiple of 32 columns of Q.
template <int kRows>
inline int64_t query_pairs(const Problem<float>& p) {
  return (p.head_dim + 31) / 32 * 16 * kRows;
}

template <int kRows>
inline void pack_query_pairs(const Problem<float>& p, const RowTile<kRows>& tile,
                             BFloat16Pair* query_t) {
  constexpr int kWidth = Simd<float>::kWidth;
  const int64_t pairs = p.head_dim / 2;
  for (int r = 0; r < kRows; r += kWidth) {
    const BFloat16Pair* from[kWidth];
    for (int l = 0; l < kWidth; ++l) {
      const bool has_row = r + l < tile.rows;
      from[l] = has_row ? in_pairs(tile.template stored_row<BFloat16>(p.query, r + l)) : nullptr;
    }
    for (int64_t d = 0; d < pairs; d += kWidth) {
      const __mmask16 columns = first_lanes(pairs - d);
      __m512 square[kWidth];  // pairs move as float32 numbers do
      for (int l = 0; l < kWidth; ++l) {
        square[l] =
            from[l] != nullptr ? _mm512_maskz_loadu_ps(columns, from[l] + d) : _mm512_setzero_ps();
      }
      transpose<float>(square);
      for (int c = 0; c < kWidth; ++c) _mm512_storeu_ps(query_t + (d + c) * kRows + r, square[c]);
    }
  }
}

/// Each vector of pairs is also shown to `use(v, pair)`.
template <int kVectors, int kRows, class Use>
QKV_INLINE void round_weights(int keys, const float* weights, BFloat16Pair* to, Use use) {
  using S = Simd<float>;
  using Pairs = Simd<BFloat16Pair>;
  for (int k = 0; k < keys; k += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const float* from = weights + k * kRows + v * S::kWidth;
      const auto second = k + 1 < keys ? S::load(from + kRows) : S::zero();
      const auto pair = Pairs::round(S::load(from), second);
      use(v, pair);
      Pairs::store(to + k / 2 * kRows + v * S::kWidth, pair);
    }
  }
}

QKV_INLINE bool is_finite(BFloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }

/// Oᵀ += Vᵀ · P for what is not finite in V, which has been left out of the product: for the pairs
/// that are kept, or all if bits is nullptr. P is weight(key, row).
template <int kVectors, int kRows, class Weight>
inline void add_non_finite(const Problem<float>& p, int keys, const BFloat16* values, Weight weight,
                           const uint8_t* bits, float* out_t) {
  for (int k = 0; k < keys; ++k) {
    for (int64_t d = 0; d < p.value_dim; ++d) {
      const BFloat16 x = values[k * p.value.row_stride + d];
      if (is_finite(x)) continue;
      for (int r = 0; r < kVectors * Simd<float>::kWidth; ++r) {
        if (bits != nullptr && (bits[k / 8 * kRows + r] >> (k % 8) & 1) == 0) continue;
        out_t[d * kRows + r] += weight(k, r) * static_cast<float>(x);
      }
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
