#pragma once

#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/transpose.inc.h"

// A matrix copied from where its columns lie to where its rows do: by squares, in registers.
// Numbers of 16 bits take lanes of 32.

namespace qkv::kernels::QKV_ISA {

/// kWidth numbers, whose bits nothing converts: those of a lane, or of its lower half.
template <class T, class Bits>
QKV_INLINE typename Simd<T>::Number load_bits(const Bits* p) {
  using Number = typename Simd<T>::Number;
  if constexpr (sizeof(Bits) == sizeof(T)) {
    Number x;
    memcpy(&x, p, sizeof(x));
    return x;
  } else {
    typedef Bits Half __attribute__((vector_size(sizeof(Number) / 2)));
    typedef uint32_t Lanes32 __attribute__((vector_size(sizeof(Number))));
    Half x;
    memcpy(&x, p, sizeof(x));
    return reinterpret_cast<Number>(__builtin_convertvector(x, Lanes32));
  }
}

template <class T, class Bits>
QKV_INLINE void store_bits(Bits* p, typename Simd<T>::Number x) {
  if constexpr (sizeof(Bits) == sizeof(T)) {
    memcpy(p, &x, sizeof(x));
  } else {
    typedef Bits Half __attribute__((vector_size(sizeof(x) / 2)));
    typedef uint32_t Lanes32 __attribute__((vector_size(sizeof(x))));
    const Half half = __builtin_convertvector(reinterpret_cast<Lanes32>(x), Half);
    memcpy(p, &half, sizeof(half));
  }
}

template <class T, class Bits>
QKV_INLINE void transpose_square(const Bits* from, int64_t from_column, Bits* to, int64_t to_row) {
  constexpr int kWidth = Simd<T>::kWidth;
  typename Simd<T>::Number square[kWidth];
#pragma GCC unroll 16
  for (int c = 0; c < kWidth; ++c) square[c] = load_bits<T>(from + c * from_column);
  transpose<T>(square);
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) store_bits<T>(to + r * to_row, square[r]);
}

template <class T, class Bits>
QKV_ONE_COPY void transpose_bits(const Transposition& x) {
  constexpr int64_t kWidth = Simd<T>::kWidth;
  constexpr int64_t kInLine = 64 / sizeof(Bits);  // of the caches
  constexpr int64_t kLine = kWidth > kInLine ? kWidth : kInLine;
  const auto* from = static_cast<const Bits*>(x.from);
  auto* to = static_cast<Bits*>(x.to);
  if (x.rows < kWidth || x.columns < kWidth) {
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t c = 0; c < x.columns; ++c) to[r * x.to_row + c] = from[c * x.from_column + r];
    }
    return;
  }
  // The last squares overlap those before, and write the same again.
  for (int64_t line = 0; line < x.rows; line += kLine) {
    const int64_t end = line + kLine < x.rows ? line + kLine : x.rows;
    for (int64_t column = 0; column < x.columns; column += kWidth) {
      const int64_t c = column < x.columns - kWidth ? column : x.columns - kWidth;
      for (int64_t row = line; row < end; row += kWidth) {
        const int64_t r = row < x.rows - kWidth ? row : x.rows - kWidth;
        transpose_square<T>(from + c * x.from_column + r, x.from_column, to + r * x.to_row + c,
                            x.to_row);
      }
    }
  }
}

template <class T>
void transpose_matrix(const Transposition& x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (x.storage != Storage::kSame) return transpose_bits<T, uint16_t>(x);
    transpose_bits<T, uint32_t>(x);
  } else {
    transpose_bits<T, uint64_t>(x);
  }
}

}  // namespace qkv::kernels::QKV_ISA
