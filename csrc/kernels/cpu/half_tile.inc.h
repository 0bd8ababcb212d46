#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/forward_tile.inc.h"

// What the forward tiles that multiply in 16 bits have in common: query rows and weights as pairs,
// rows in lanes.
//
//     query_t[d / 2][row] = (q[row][d], q[row][d + 1])
//     weights[k / 2][row] = (w[k][row], w[k + 1][row]), rounded

namespace qkv::kernels::QKV_ISA {

/// Whether tiles are to multiply in 16 bits, with rounded weights. What that changes in an output
/// moves all dS of its row, and so dQ along the mean of the keys: of few and short ones by more
/// than rounding dQ does. For these there is little to win, too.
inline bool rounds_weights_of(const Problem<float>& p) {
  return p.keys >= 32 && p.head_dim >= 8 && p.keys * p.head_dim >= 1024;
}

/// What Products::prepare left for the key/value head of a tile.
template <class Products>
inline void* prepared_of_head(const ForwardParams<float>& params,
                              const RowTile<Products::kRows>& tile) {
  const int64_t head = tile.batch_number * params.problem.kv_heads + tile.kv_head;
  return static_cast<char*>(params.prepared) + head * Products::prepared_bytes(params.problem);
}

/// Two numbers that lie side by side.
QKV_INLINE const BFloat16Pair* in_pairs(const BFloat16* x) {
  return reinterpret_cast<const BFloat16Pair*>(x);
}

/// to[k / 2][d] = (x[k][d], x[k + 1][d]), rows of whole vectors; zeros after an odd number of keys.
inline void pack_keys_in_pairs(const BFloat16* x, int64_t stride, int64_t keys, int64_t width,
                               BFloat16Pair* to) {
  for (int64_t k = 0; k < keys; k += 2, x += 2 * stride, to += round_up_to_vector<float>(width)) {
    interleave(x, k + 1 < keys ? x + stride : nullptr, width, to);
  }
}

/// The size of what is below: zeros fill it up to a multiple of 32 columns.
inline int64_t column_pairs(int64_t width, int64_t rows) { return (width + 31) / 32 * 16 * rows; }

/// to[d / 2][row] = (x[row][d], x[row][d + 1])
template <int kRows, class Half>
inline void pack_columns_in_pairs(const RowTile<kRows>& tile, const Operand<const float>& x,
                                  int64_t width, HalfPair<Half>* to, int lanes = kRows) {
  constexpr int kWidth = Simd<float>::kWidth;
  const auto rows_of_x = tile.template stored_rows_in<Half>(x);
  for (int r = 0; r < lanes; r += kWidth) {
    const Half* from[kWidth];
    for (int l = 0; l < kWidth; ++l) {
      from[l] = r + l < tile.rows ? rows_of_x[r + l] : nullptr;
    }
    for (int64_t d = 0; d < width; d += 2 * kWidth) {
      const __mmask32 columns = first_lanes_of_32(width - d);
      __m512 square[kWidth];  // pairs move as float32 numbers do
      for (int l = 0; l < kWidth; ++l) {
        square[l] = from[l] != nullptr
                        ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(columns, from[l] + d))
                        : _mm512_setzero_ps();
      }
      transpose<float>(square);
      for (int c = 0; c < kWidth; ++c) _mm512_storeu_ps(to + (d / 2 + c) * kRows + r, square[c]);
    }
  }
}

template <class Half>
QKV_INLINE bool is_finite(Half x) {
  return (x.bits & Half::kExponent) != Half::kExponent;
}

inline void set_non_finite_to_zero(int64_t count, BFloat16Pair* pairs) {
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(pairs[i].first)) pairs[i].first = {0};
    if (!is_finite(pairs[i].second)) pairs[i].second = {0};
  }
}

/// Of key k and row r in a tile pairs[keys / 2][kRows].
template <int kRows, class Half>
QKV_INLINE float number_of_pairs(const HalfPair<Half>* pairs, int k, int r) {
  const HalfPair<Half> pair = pairs[k / 2 * kRows + r];
  return static_cast<float>(k % 2 == 0 ? pair.first : pair.second);
}

/// Oᵀ += Vᵀ · P for what is not finite in V, which has been left out of the product: for the pairs
/// that are kept, or all if bits is nullptr. P is weight(key, row).
template <int kVectors, int kRows, class Half, class Weight>
inline void add_non_finite(int keys, int64_t width, const Half* values, int64_t stride,
                           Weight weight, const uint8_t* bits, float* out_t) {
  for (int k = 0; k < keys; ++k) {
    for (int64_t d = 0; d < width; ++d) {
      const Half x = values[k * stride + d];
      if (is_finite(x)) continue;
      for (int r = 0; r < kVectors * Simd<float>::kWidth; ++r) {
        if (bits != nullptr && (bits[k / 8 * kRows + r] >> (k % 8) & 1) == 0) continue;
        out_t[d * kRows + r] += weight(k, r) * static_cast<float>(x);
      }
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
