#pragma once

#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// What is masked out cannot matter, even if it is NaN or inf: but 0 · NaN is NaN, so a matrix
// product over a tile with masked pairs would let it through. Tiles that are partly masked look at
// their operands first, and those with something non-finite in them take the products below, which
// leave out the masked terms. For finite operands these give the same bits as the plain products.

namespace qkv::kernels::QKV_ISA {

template <class T, class Stored>
inline bool all_finite(const Stored* x, int64_t row_stride, int64_t rows, int64_t width) {
  using S = Simd<T>;
  constexpr int kSums = 4;        // as one waits for the sum before it
  typename S::Number sum[kSums];  // of x · 0: 0 or NaN
  for (auto& s : sum) s = S::zero();
  for (int64_t r = 0; r < rows; ++r, x += row_stride) {
    int64_t d = 0;
    const auto add = [&](int i) __attribute__((always_inline)) {
      sum[i] = S::fma(load_stored<T>(x + d), S::zero(), sum[i]);
      d += S::kWidth;
    };
    while (d + kSums * S::kWidth <= width) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) add(i);
    }
    while (d + S::kWidth <= width) add(0);
    if (d < width) sum[0] = S::fma(load_first<T>(x + d, width - d), S::zero(), sum[0]);
  }
  return S::sum((sum[0] + sum[1]) + (sum[2] + sum[3])) == T(0);
}

/// c[d][r] += sum over the keys n that row r keeps of a[n][d] · b[n][r], for kVectors vectors of
/// the tile's kRows rows
template <class T, int kVectors, int kRows = kVectors* Simd<T>::kWidth>
inline void multiply_add_kept_keys(int64_t keys, int64_t width, const T* a, int64_t a_row,
                                   const T* b, const uint8_t* bits, T* c) {
  using S = Simd<T>;
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t d = 0; d < width; ++d) {
      auto sum = S::zero();
      for (int64_t n = 0; n < keys; ++n) {
        const auto kept = S::bit_of_bytes(bits + n / 8 * kRows + v * S::kWidth, n % 8);
        const auto b_n = S::load(b + n * kRows + v * S::kWidth);
        sum = S::select(kept, S::fma(S::set(a[n * a_row + d]), b_n, sum), sum);
      }
      T* c_d = c + d * kRows + v * S::kWidth;
      S::store(c_d, S::load(c_d) + sum);
    }
  }
}

/// c[r][d] += the same, of the tile's first `rows`
template <class T, int kRows>
inline void multiply_add_kept_keys_by_rows(int64_t rows, int64_t keys, int64_t width, const T* a,
                                           int64_t a_row, const T* b, const uint8_t* bits,
                                           Sums<T> c) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < width; ++d) {
      T sum = T(0);
      for (int64_t n = 0; n < keys; ++n) {
        if ((bits[n / 8 * kRows + r] >> (n % 8) & 1) == 0) continue;
        sum = Simd<T>::fma(a[n * a_row + d], b[n * kRows + r], sum);
      }
      c.first[r * c.row + d] += sum;
    }
  }
}

/// c[n][d] += sum over the rows r that keep key n of a[n][r] · b[r][d]; rows of c have
/// `width` numbers, whole vectors
template <class T, int kRows>
inline void multiply_add_kept_rows(int64_t keys, int64_t rows, const T* a, const T* b,
                                   int64_t b_row, const uint8_t* bits, int64_t width, Sums<T> c) {
  using S = Simd<T>;
  for (int64_t n = 0; n < keys; ++n) {
    for (int64_t d = 0; d < width; d += S::kWidth) {
      auto sum = S::zero();
      for (int64_t r = 0; r < rows; ++r) {
        if ((bits[n / 8 * kRows + r] >> (n % 8) & 1) == 0) continue;
        sum = S::fma(S::set(a[n * kRows + r]), S::load(b + r * b_row + d), sum);
      }
      T* c_n = c.first + n * c.row + d;
      const auto so_far = c.has_any ? S::load(c_n) : S::zero();
      S::store(c_n, so_far + sum);
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
