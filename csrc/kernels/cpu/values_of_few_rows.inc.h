#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/next_rows.inc.h"

namespace qkv::kernels::QKV_ISA {

/// Values in bfloat16 of few rows (few_rows.inc.h), which are read once: each vector of memory is
/// two of numbers, its even columns and its odd ones, converted with one operation each.
struct BFloat16Values {
  using S = Simd<float>;
  using Number = S::Number;
  static constexpr int kColumns = 32;  // of a vector

  /// out[r][d] += sum over keys of weights[k][r] · value_k[d]
  template <int kRows>
  static void add_values(int keys, int64_t width, const BFloat16* value, int64_t value_row,
                         const float* weights, float* out, int64_t out_row, const NextRows& next) {
    constexpr int kMost = kRows > 4 ? 1 : 2, kOfPass = kMost * kColumns;
    const int passes = static_cast<int>((width + kOfPass - 1) / kOfPass);
    for (int pass = 0; pass < passes; ++pass) {
      const int64_t d = pass * kOfPass;
      const auto add = [&](auto vectors) {
        add_columns<kRows, vectors()>(keys, width - d, value + d, value_row, weights, out + d,
                                      out_row, {next, pass, passes});
      };
      width - d > kColumns ? add(Constant<kMost>{}) : add(Constant<1>{});
    }
  }

 protected:
  static QKV_INLINE __m512i columns(const BFloat16* from, int64_t left) {
    return left >= kColumns ? _mm512_loadu_si512(from)
                            : _mm512_maskz_loadu_epi16(first_lanes_of_32(left), from);
  }

 private:
  /// kVectors vectors of columns, `left` of them or more. Keys are summed before they are added to
  /// out, as in multiply_add.
  template <int kRows, int kVectors>
  static void add_columns(int keys, int64_t left, const BFloat16* value, int64_t value_row,
                          const float* weights, float* out, int64_t out_row, ShareOfNextRows next) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    Number sum[kRows][kVectors][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v][0] = sum[r][v][1] = S::zero();
      }
    }
    for (int k = 0; k < keys; ++k, value += value_row) {
      next.fetch_next();
      Number x[kVectors][2];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const __m512i pairs = columns(value + v * kColumns, left - v * kColumns);
        x[v][0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        x[v][1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto weight = S::set(weights[k * kRows + r]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v][0] = S::fma(weight, x[v][0], sum[r][v][0]);
          sum[r][v][1] = S::fma(weight, x[v][1], sum[r][v][1]);
        }
      }
    }
    // Back to where they belong: 0, 16, 1, 17, .. and 8, 24, 9, 25, ..
    const __m512i half = _mm512_srli_epi32(lane, 1);
    const __m512i first =
        _mm512_or_si512(half, _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(1)), 4));
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int64_t d = v * kColumns;
        const Number even = sum[r][v][0], odd = sum[r][v][1];
        const auto add = [=](int64_t from, __m512i order) __attribute__((always_inline)) {
          const __mmask16 lanes = first_lanes(left - from);
          float* to = out + r * out_row + from;
          const auto more = _mm512_permutex2var_ps(even, order, odd);
          _mm512_mask_storeu_ps(to, lanes, _mm512_maskz_loadu_ps(lanes, to) + more);
        };
        add(d, first);
        if (left - d > 16) add(d + 16, second);
      }
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
