#pragma once

#include "kernels/cpu/tile_product.inc.h"

// A product of a few rows at a time, and work on what it left of the rows before, mixed: of the
// operations of an exponential each waits for the one before it, and only some take the place of
// multiply-adds. What is worked on stays in registers: on Zen 4 a store of 64 bytes takes the place
// of 1.4 multiply-adds, as a multiply-add reads its third operand by the port of stores.

namespace qkv::kernels::QKV_ISA {

/// Rows that are multiplied while as many are worked on.
template <int kVectors>
constexpr int kRowsBeside = kVectors == 1 ? 8 : 4;
constexpr int kMostRowsBeside = 8;

/// C = A · B: see(x) gets some rows of C, x[kRowsBeside][kVectors], then work(row, v, x), v a
/// Constant, two of these at a time, x[2], while the next ones are multiplied. `rows` is a multiple
/// of kMostRowsBeside, and not 0.
template <class T, int kVectors, class See, class Work>
QKV_INLINE void product_with_work(int64_t rows, int64_t depth, const T* a, int64_t a_row,
                                  const T* b, int64_t b_row, See see, Work work) {
  using S = Simd<T>;
  static_assert(kVectors <= 3);
  constexpr int kRows = kRowsBeside<kVectors>, kPieces = kRows / 2 * kVectors;
  using Number = typename S::Number;
  Number sum[kRows][kVectors], before[kRows][kVectors];
  const auto for_each_piece = [&](int64_t first, auto go_on) __attribute__((always_inline)) {
    const auto work_on = [&](auto r, auto v) __attribute__((always_inline)) {
      go_on();
      Number x[2] = {before[r()][v()], before[r() + 1][v()]};
      work(first + r(), v, x);
    };
    const auto work_on_rows = [&](auto r) __attribute__((always_inline)) {
      work_on(r, Constant<0>{});
      if constexpr (kVectors > 1) work_on(r, Constant<1>{});
      if constexpr (kVectors > 2) work_on(r, Constant<2>{});
    };
    work_on_rows(Constant<0>{});
    work_on_rows(Constant<2>{});
    if constexpr (kRows > 4) {
      work_on_rows(Constant<4>{});
      work_on_rows(Constant<6>{});
    }
  };
  const int64_t steps_of_piece = depth / kPieces;
  for (int64_t first = 0; first < rows; first += kRows, a += kRows * a_row) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::zero();
    const T *a_k = a, *b_k = b;
    const auto step = [&]() __attribute__((always_inline)) {
      decltype(S::load(b)) b_kv[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) b_kv[v] = S::load(b_k + v * S::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto a_rk = S::set(a_k[r * a_row]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = S::fma(a_rk, b_kv[v], sum[r][v]);
      }
      ++a_k;
      b_k += b_row;
    };
    int64_t left = depth;
    if (first > 0) {
      for_each_piece(
          first - kRows, [&]() __attribute__((always_inline)) {
            for (int64_t s = 0; s < steps_of_piece; ++s) step();
          });
      left -= steps_of_piece * kPieces;
    }
    for (; left > 0; --left) step();
    see(sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) before[r][v] = sum[r][v];
  }
  for_each_piece(rows - kRows, []() __attribute__((always_inline)){});
}

}  // namespace qkv::kernels::QKV_ISA
