#pragma once

#include "kernels/cpu/math.inc.h"

// A square of as many vectors as a vector has lanes, transposed in registers, and sums over lanes.
//
// Floats go by quarters of 128 bits, within which and of which two vectors can be shuffled in one
// instruction without a vector of indices: squares of 4 x 4 numbers in each quarter, and of 4 x 4
// quarters. Where a vector has fewer of them, or numbers are larger, step h exchanges the bits h of
// vector number and lane.

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

/// Of two vectors of kWidth lanes, a and b after each other, the number that lane l takes.
template <int kWidth>
struct Shuffles {
  /// Steps of an exchange: a keeps the lanes without bit kStep, b those with it.
  template <int kStep>
  static constexpr int first(int l) {
    return l & kStep ? kWidth + l - kStep : l;
  }
  template <int kStep>
  static constexpr int second(int l) {
    return l & kStep ? kWidth + l : l + kStep;
  }
  /// In each quarter a b a b, of its lower or upper half.
  template <int kHalf>
  static constexpr int singles(int l) {
    return l % 2 * kWidth + l / 4 * 4 + 2 * kHalf + l % 4 / 2;
  }
  /// In each quarter a a b b, of its lower or upper half.
  template <int kHalf>
  static constexpr int doubles(int l) {
    return l % 4 / 2 * kWidth + l / 4 * 4 + 2 * kHalf + l % 2;
  }
  /// Quarters a a b b: the even or the odd ones.
  template <int kOdd>
  static constexpr int quarters(int l) {
    return l / 8 * kWidth + (l / 4 % 2 * 2 + kOdd) * 4 + l % 4;
  }
};

template <int (*kFrom)(int), class Number, int... kLane>
QKV_INLINE Number shuffled(Number a, Number b, Lanes<kLane...>) {
  return __builtin_shufflevector(a, b, kFrom(kLane)...);
}

template <class T, int (*kFrom)(int)>
QKV_INLINE typename Simd<T>::Number shuffled(typename Simd<T>::Number a,
                                             typename Simd<T>::Number b) {
  return shuffled<kFrom>(a, b, typename LanesUpTo<Simd<T>::kWidth>::Type{});
}

/// Whether four numbers have 128 bits, and a vector four times as many.
template <class T>
constexpr bool kHasQuads = sizeof(T) == 4 && Simd<T>::kWidth % 4 == 0;
template <class T>
constexpr bool kHasFourQuads = kHasQuads<T>&& Simd<T>::kWidth == 16;

/// Four vectors, for two kinds of shuffles of two: the square of what they move is transposed.
template <class T, int (*kLow)(int), int (*kHigh)(int), int (*kLow2)(int), int (*kHigh2)(int)>
QKV_INLINE void transpose_four(typename Simd<T>::Number& a, typename Simd<T>::Number& b,
                               typename Simd<T>::Number& c, typename Simd<T>::Number& d) {
  const auto ab0 = shuffled<T, kLow>(a, b), ab1 = shuffled<T, kHigh>(a, b);
  const auto cd0 = shuffled<T, kLow>(c, d), cd1 = shuffled<T, kHigh>(c, d);
  a = shuffled<T, kLow2>(ab0, cd0);
  b = shuffled<T, kHigh2>(ab0, cd0);
  c = shuffled<T, kLow2>(ab1, cd1);
  d = shuffled<T, kHigh2>(ab1, cd1);
}

/// x[i] lane l <-> x[l] lane i
template <class T, int kStep = Simd<T>::kWidth / 2>
QKV_INLINE void transpose(typename Simd<T>::Number (&x)[Simd<T>::kWidth]) {
  constexpr int kWidth = Simd<T>::kWidth;
  using From = Shuffles<kWidth>;
  if constexpr (kHasQuads<T> && kStep == 2) {
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      transpose_four<T, From::template singles<0>, From::template singles<1>,
                     From::template doubles<0>, From::template doubles<1>>(x[i], x[i + 1], x[i + 2],
                                                                           x[i + 3]);
    }
  } else if constexpr (kHasFourQuads<T> && kStep == 8) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // b and c change places: quarters go by even and odd ones
      transpose_four<T, From::template quarters<0>, From::template quarters<1>,
                     From::template quarters<0>, From::template quarters<1>>(x[i], x[i + 4],
                                                                             x[i + 8], x[i + 12]);
      const auto second = x[i + 8];
      x[i + 8] = x[i + 4];
      x[i + 4] = second;
    }
    transpose<T, 2>(x);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if ((i & kStep) != 0) continue;
      const auto a = x[i], b = x[i + kStep];
      x[i] = shuffled<T, From::template first<kStep>>(a, b);
      x[i + kStep] = shuffled<T, From::template second<kStep>>(a, b);
    }
    if constexpr (kStep > 1) transpose<T, kStep / 2>(x);
  }
}

/// a + b over half of the lanes that they are summed over.
template <class T, int (*kLow)(int), int (*kHigh)(int)>
QKV_INLINE typename Simd<T>::Number fold(typename Simd<T>::Number a, typename Simd<T>::Number b) {
  return shuffled<T, kLow>(a, b) + shuffled<T, kHigh>(a, b);
}

/// In each quarter: its sums of a, b, c and d.
template <class T>
QKV_INLINE typename Simd<T>::Number sums_in_quarters(typename Simd<T>::Number a,
                                                     typename Simd<T>::Number b,
                                                     typename Simd<T>::Number c,
                                                     typename Simd<T>::Number d) {
  using From = Shuffles<Simd<T>::kWidth>;
  const auto add = fold<T, From::template singles<0>, From::template singles<1>>;
  return fold<T, From::template doubles<0>, From::template doubles<1>>(add(a, b), add(c, d));
}

/// Lane l: the sum of all lanes of x[l].
template <class T, int kStep = Simd<T>::kWidth / 2>
QKV_INLINE typename Simd<T>::Number sums_over_lanes(
    typename Simd<T>::Number (&x)[Simd<T>::kWidth]) {
  using From = Shuffles<Simd<T>::kWidth>;
  if constexpr (kHasFourQuads<T>) {
    const auto add = fold<T, From::template quarters<0>, From::template quarters<1>>;
    return add(add(sums_in_quarters<T>(x[0], x[1], x[2], x[3]),
                   sums_in_quarters<T>(x[4], x[5], x[6], x[7])),
               add(sums_in_quarters<T>(x[8], x[9], x[10], x[11]),
                   sums_in_quarters<T>(x[12], x[13], x[14], x[15])));
  } else if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kStep; ++i) {
      x[i] = fold<T, From::template first<kStep>, From::template second<kStep>>(x[i], x[i + kStep]);
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
  // Squares of their own for whole ones and for the last: one that is also indexed by a number
  // known only at run time does not stay in registers.
  int64_t d = 0;
  for (; d + kWidth <= width; d += kWidth, to += kWidth * to_row) {
    typename S::Number square[kWidth];
#pragma GCC unroll 16
    for (int l = 0; l < kWidth; ++l) {
      square[l] = load_stored<T>(from[l] != nullptr ? from[l] + d : kZeros);
    }
    transpose<T>(square);
#pragma GCC unroll 16
    for (int c = 0; c < kWidth; ++c) S::store(to + c * to_row, square[c] * factor);
  }
  const int left = static_cast<int>(width - d);
  if (left == 0) return;
  typename S::Number square[kWidth];
  for (int l = 0; l < kWidth; ++l) {
    square[l] = from[l] != nullptr ? load_first<T>(from[l] + d, left) : S::zero();
  }
  transpose<T>(square);
  for (int c = 0; c < left; ++c) S::store(to + c * to_row, square[c] * factor);
}

/// put(l, d, x, count) for all lanes l and each vector of the columns d < width: the first `count`
/// numbers of x are scale[l] · from[d · from_row + l] and those after it.
template <class T, class Put>
QKV_INLINE void put_columns(const T* from, int64_t from_row, int64_t width,
                            typename Simd<T>::Number scale, Put put) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  int64_t d = 0;
  for (; d + kWidth <= width; d += kWidth, from += kWidth * from_row) {
    typename S::Number square[kWidth];
#pragma GCC unroll 16
    for (int c = 0; c < kWidth; ++c) square[c] = S::load(from + c * from_row) * scale;
    transpose<T>(square);
#pragma GCC unroll 16
    for (int l = 0; l < kWidth; ++l) put(l, d, square[l], kWidth);
  }
  const int left = static_cast<int>(width - d);
  if (left == 0) return;
  typename S::Number square[kWidth];
  for (int c = 0; c < kWidth; ++c) {
    square[c] = c < left ? S::load(from + c * from_row) * scale : S::zero();
  }
  transpose<T>(square);
  for (int l = 0; l < kWidth; ++l) put(l, d, square[l], left);
}

/// to[l][d] = scale[l] · from[d · from_row + l] for d < width and the rows that are not nullptr,
/// rounded if those are stored in 16 bits
template <class T, class Stored>
QKV_ONE_COPY void transpose_columns(const T* from, int64_t from_row, int64_t width,
                                    typename Simd<T>::Number scale,
                                    Stored* const (&to)[Simd<T>::kWidth]) {
  using S = Simd<T>;
  put_columns<T>(
      from, from_row, width,
      scale, [&](int l, int64_t d, typename S::Number x, int count) __attribute__((always_inline)) {
        if (to[l] == nullptr) return;
        if (count == S::kWidth) {
          store_rounded<T>(to[l] + d, x);
        } else {
          store_first<T>(to[l] + d, x, count);
        }
      });
}

}  // namespace qkv::kernels::QKV_ISA
