#pragma once

#include "kernels/cpu/math.inc.h"

// A square of as many vectors as a vector has lanes, transposed in registers: step h of
// log2(lanes) exchanges the bits h of vector number and lane.

namespace qkv::kernels::QKV_ISA {

/// The numbers 0 .. kCount - 1 as template arguments.
template <int... kLane>
struct Lanes {};
template <int kCount, int... kLane>
struct LanesUpTo : LanesUpTo<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct LanesUpTo<0, kLane...> {
  using Type = Lanes<kLane...>;
};

template <int kStep, class Number, int... kLane>
QKV_INLINE void exchange(Number& a, Number& b, Lanes<kLane...>) {
  constexpr int kWidth = sizeof...(kLane);
  const Number first =
      __builtin_shufflevector(a, b, ((kLane & kStep) ? kWidth + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(a, b, ((kLane & kStep) ? kWidth + kLane : kLane + kStep)...);
  a = first;
}

/// x[i] lane l <-> x[l] lane i
template <class T, int kStep = Simd<T>::kWidth / 2>
QKV_INLINE void transpose(typename Simd<T>::Number (&x)[Simd<T>::kWidth]) {
  constexpr int kWidth = Simd<T>::kWidth;
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if ((i & kStep) == 0) exchange<kStep>(x[i], x[i + kStep], typename LanesUpTo<kWidth>::Type{});
  }
  if constexpr (kStep > 1) transpose<T, kStep / 2>(x);
}

/// Lane l: the sum of all lanes of x[l].
template <class T, int kStep = Simd<T>::kWidth / 2>
QKV_INLINE typename Simd<T>::Number sums_over_lanes(
    typename Simd<T>::Number (&x)[Simd<T>::kWidth]) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kStep; ++i) {
      exchange<kStep>(x[i], x[i + kStep], typename LanesUpTo<Simd<T>::kWidth>::Type{});
      x[i] = x[i] + x[i + kStep];
    }
    return sums_over_lanes<T, kStep / 2>(x);
  } else {
    return x[0];
  }
}

/// to[d · to_row + l] = scale · from[l][d] for d < width; a row that is nullptr counts as zeros.
template <class T, class Stored>
QKV_ONE_COPY void transpose_rows(const Stored* const (&from)[Simd<T>::kWidth], int64_t width,
                                 T scale, T* to, int64_t to_row) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  static constexpr Stored kZeros[kWidth] = {};
  const auto factor = S::set(scale);
  for (int64_t d = 0; d < width; d += kWidth) {
    typename S::Number square[kWidth];
    const int columns = width - d < kWidth ? static_cast<int>(width - d) : kWidth;
    if (columns == kWidth) {
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) {
        square[l] = load_stored<T>(from[l] != nullptr ? from[l] + d : kZeros);
      }
    } else {
      for (int l = 0; l < kWidth; ++l) {
        square[l] = S::zero();
        if (from[l] == nullptr) continue;
        alignas(64) T line[kWidth] = {};
        for (int c = 0; c < columns; ++c) line[c] = static_cast<T>(from[l][d + c]);
        square[l] = S::load(line);
      }
    }
    transpose<T>(square);
    T* line = to + d * to_row;
    if (columns == kWidth) {
#pragma GCC unroll 16
      for (int c = 0; c < kWidth; ++c) S::store(line + c * to_row, square[c] * factor);
    } else {
      for (int c = 0; c < columns; ++c) S::store(line + c * to_row, square[c] * factor);
    }
  }
}

/// to[l][d] = scale[l] · from[d · from_row + l] for d < width and the rows that are not nullptr,
/// rounded if those are stored in 16 bits
template <class T, class Stored>
QKV_ONE_COPY void transpose_columns(const T* from, int64_t from_row, int64_t width,
                                    typename Simd<T>::Number scale,
                                    Stored* const (&to)[Simd<T>::kWidth]) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  for (int64_t d = 0; d < width; d += kWidth) {
    typename S::Number square[kWidth];
    const int columns = width - d < kWidth ? static_cast<int>(width - d) : kWidth;
    for (int c = 0; c < kWidth; ++c) {
      square[c] = c < columns ? S::load(from + (d + c) * from_row) * scale : S::zero();
    }
    transpose<T>(square);
    if (columns == kWidth) {
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) {
        if (to[l] != nullptr) store_rounded<T>(to[l] + d, square[l]);
      }
    } else {
      for (int l = 0; l < kWidth; ++l) {
        if (to[l] == nullptr) continue;
        alignas(64) T line[kWidth];
        S::store(line, square[l]);
        for (int c = 0; c < columns; ++c) to[l][d + c] = rounded<Stored>(line[c]);
      }
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
