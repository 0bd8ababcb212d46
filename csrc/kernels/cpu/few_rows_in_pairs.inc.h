#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/transpose.inc.h"
#include "kernels/cpu/values_of_few_rows.inc.h"

// The products of few_rows.inc.h in bfloat16, exact: those of keys two columns at a time.
//
// With one row a vector has 32 columns of a key. With four it has 8 columns of each of four keys,
// and the queries have the same 8 columns in all quarters, so that sums over lanes end in quarters:
//
//                    quarter 0     1      2      3
//     four keys             k0     k1     k2     k3      columns 8c .. 8c + 8
//     query r               q_r    q_r    q_r    q_r     the same
//     sum[r]              4 sums  ..                     -> S[k0 .. k3][r]

namespace qkv::kernels::QKV_ISA {

struct FewRowsInPairs : BFloat16Values {
  using Pairs = Simd<BFloat16Pair>;
  using Query = BFloat16Pair;
  template <int kRows>
  struct Registers {};
  static constexpr int kMostRows = 4, kLeastRows = 4;
  static constexpr int kQuarters = 4;  // of a vector

  /// Pairs that a query takes.
  static int64_t query_size(int64_t rows, int64_t width) {
    const int64_t vectors = (width + kColumns - 1) / kColumns;
    return vectors * Pairs::kWidth * (rows == 1 ? 1 : rows * kQuarters);
  }

  /// One row as it is; of several query[d / 8][r][4 times 8 columns]. Zeros from `width` on, and
  /// for a row that is nullptr.
  template <int kRows>
  static void pack_query(const BFloat16* const (&from)[kRows], int64_t width, float /*scale*/,
                         BFloat16Pair* query) {
    for (int64_t d = 0; d < width; d += kColumns) {
      for (int r = 0; r < kRows; ++r) {
        const __m512i x =
            from[r] != nullptr ? columns(from[r] + d, width - d) : _mm512_setzero_si512();
        BFloat16Pair* to = query + d / 2 * (kRows == 1 ? 1 : kRows * kQuarters);
        if constexpr (kRows == 1) {
          _mm512_storeu_si512(to, x);
        } else {
          to += r * Pairs::kWidth;
          constexpr int kNext = kRows * Pairs::kWidth;
          _mm512_storeu_si512(to, _mm512_shuffle_i32x4(x, x, 0x00));
          _mm512_storeu_si512(to + kNext, _mm512_shuffle_i32x4(x, x, 0x55));
          _mm512_storeu_si512(to + 2 * kNext, _mm512_shuffle_i32x4(x, x, 0xaa));
          _mm512_storeu_si512(to + 3 * kNext, _mm512_shuffle_i32x4(x, x, 0xff));
        }
      }
    }
  }

  /// scores[k][r] = scale · <key_k, query_r>, whole vectors of them.
  template <int kRows>
  static void scores(int keys, int64_t width, const BFloat16* key, int64_t key_row,
                     const BFloat16Pair* query, float scale, float* scores, const NextRows& next) {
    if constexpr (kRows == 1) {
      for (int k = 0; k < keys; ++k, key += key_row) {
        next.fetch(k);
        auto sum = S::zero();
        for (int64_t d = 0; d < width; d += kColumns) {
          sum = Pairs::fma(factor(columns(key + d, width - d)), Pairs::load(query + d / 2), sum);
        }
        scores[k] = scale * S::sum(sum);
      }
    } else {
      static_assert(kRows == kQuarters, "sums of a vector's quarters are scores of four rows");
      constexpr int kGroups = 2;  // of four keys, for which a query is loaded once
      for (int first = 0; first < keys; first += kGroups * kQuarters) {
        const BFloat16* row[kGroups * kQuarters];  // of the last key again where there is none
        for (int k = 0; k < kGroups * kQuarters; ++k) {
          row[k] = key + (first + k < keys ? first + k : keys - 1) * key_row;
          next.fetch(first + k);
        }
        Number sum[kGroups][kRows];
        for (auto& group : sum) {
          for (auto& s : group) s = S::zero();
        }
        for (int64_t d = 0; d < width; d += kColumns) {
          __m512i x[kGroups][kQuarters];
#pragma GCC unroll 2
          for (int g = 0; g < kGroups; ++g) quarters_of_keys(row + g * kQuarters, d, width, x[g]);
#pragma GCC unroll 4
          for (int c = 0; c < kQuarters; ++c) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              const auto q =
                  Pairs::load(query + d / 2 * kRows * kQuarters + (c * kRows + r) * Pairs::kWidth);
#pragma GCC unroll 2
              for (int g = 0; g < kGroups; ++g) {
                sum[g][r] = Pairs::fma(factor(x[g][c]), q, sum[g][r]);
              }
            }
          }
        }
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          S::store(
              scores + (first + g * kQuarters) * kRows,
              S::set(scale) * sums_in_quarters<float>(sum[g][0], sum[g][1], sum[g][2], sum[g][3]));
        }
      }
    }
  }

 private:
  static QKV_INLINE Pairs::Factor factor(__m512i x) { return reinterpret_cast<Pairs::Factor>(x); }

  /// x[c]: columns d + 8c .. d + 8c + 8 of four keys.
  static QKV_INLINE void quarters_of_keys(const BFloat16* const* row, int64_t d, int64_t width,
                                          __m512i (&x)[kQuarters]) {
    __m512i key[kQuarters];
#pragma GCC unroll 4
    for (int k = 0; k < kQuarters; ++k) key[k] = columns(row[k] + d, width - d);
    const __m512i low01 = _mm512_shuffle_i32x4(key[0], key[1], 0x44);
    const __m512i low23 = _mm512_shuffle_i32x4(key[2], key[3], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(key[0], key[1], 0xee);
    const __m512i high23 = _mm512_shuffle_i32x4(key[2], key[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    x[1] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    x[2] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    x[3] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
};

}  // namespace qkv::kernels::QKV_ISA
