#pragma once

#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/transpose.inc.h"

// Oᵀ += Vᵀ · P of a single vector of rows, V in 16 bits. A tile reads V number by number, so that
// it is converted or interleaved first; where one vector shares that, it takes a fifth of the time
// of the product. Here V is read where it lies, by the vector, and sums are transposed:
//
//     O[row][columns of V]  +=  P[k][row] · V[k][columns]
//       (16)    (lanes)          broadcast
//
// Each sum has the bits that tile_product.inc.h gives it.

namespace qkv::kernels::QKV_ISA {

/// Whether so many keys are worth the transpositions, the sums of as many rows as a vector has fill
/// the time of a multiply-add, and the rest of a row is loaded by a mask, if there is one.
template <class T, int kVectors>
constexpr bool takes_values_in_lanes(int64_t keys, int64_t width) {
  constexpr int kWidth = Simd<T>::kWidth;
  const bool loads_all = kWidth == 16 || width % kWidth == 0;
  return kVectors == 1 && sizeof(T) == 4 && kWidth >= 8 && keys >= 64 && loads_all;
}

/// sum[row] += P[k][row] · load(k) over k < depth. A row of P is `stride` factors.
template <class Factor, class Number, int kRows, class Load>
QKV_INLINE void add_values_in_lanes(int64_t depth, const Factor* weights, int64_t stride, Load load,
                                    Number (&sum)[kRows]) {
  using S = Simd<Factor>;
  for (int64_t k = 0; k < depth; ++k, weights += stride) {
    const auto values = load(k);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sum[r] = S::fma(S::set(weights[r]), values, sum[r]);
  }
}

/// Of numbers that are converted as they are read.
template <class T, class Stored>
QKV_ONE_COPY void add_values_in_lanes(int64_t width, int64_t keys, const Stored* values,
                                      int64_t value_stride, const T* weights, int64_t stride,
                                      Sums<T> out_t) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  const auto add = [&](int64_t d, int columns, auto load) __attribute__((always_inline)) {
    typename S::Number sum[kWidth];
#pragma GCC unroll 16
    for (auto& x : sum) x = S::zero();
    add_values_in_lanes(keys, weights, stride, load, sum);
    transpose<T>(sum);
    T* line = out_t.first + d * out_t.row;
#pragma GCC unroll 16
    for (int c = 0; c < kWidth; ++c, line += out_t.row) {
      if (c < columns) S::store(line, out_t.has_any ? S::load(line) + sum[c] : sum[c]);
    }
  };
  int64_t d = 0;
  for (; d + kWidth <= width; d += kWidth) {
    add(
        d, kWidth, [=](int64_t k) __attribute__((always_inline)) {
          return load_stored<T>(values + k * value_stride + d);
        });
  }
  if (const int left = static_cast<int>(width - d); left > 0) {
    add(
        d, left, [=](int64_t k) __attribute__((always_inline)) {
          return load_first<T>(values + k * value_stride + d, left);
        });
  }
}

}  // namespace qkv::kernels::QKV_ISA
