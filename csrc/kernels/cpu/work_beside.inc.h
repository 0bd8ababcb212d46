#pragma once

#include "kernels/cpu/tile_product.inc.h"

// A product of a few rows at a time, and work on what it left of the rows before, mixed: of the
// operations of an exponential each waits for the one before it, and only some take the place of
// multiply-adds.

namespace qkv::kernels::QKV_ISA {

constexpr int kRowsBeside = 8;
/// Pieces that the work on one vector of those rows comes in: two rows each.
constexpr int kPiecesBeside = kRowsBeside / 2;

/// C = A · B: take(first, x) gets rows first .. of C as x[kRowsBeside][kVectors], whose registers
/// it leaves. work(first, v, piece), v a Constant, is called for rows that it took: all pieces of
/// one v after each other. `rows` is a multiple of kRowsBeside.
template <class T, int kVectors, class Take, class Work>
QKV_INLINE void product_with_work(int64_t rows, int64_t depth, const T* a, int64_t a_row,
                                  const T* b, int64_t b_row, Take take, Work work) {
  using S = Simd<T>;
  const int64_t steps_of_piece = depth / (kVectors * kPiecesBeside);
  const auto for_each_vector = [](auto f) __attribute__((always_inline)) {
    f(Constant<0>{});
    if constexpr (kVectors > 1) f(Constant<1>{});
    if constexpr (kVectors > 2) f(Constant<2>{});
  };
  for (int64_t first = 0; first < rows; first += kRowsBeside, a += kRowsBeside * a_row) {
    typename S::Number sum[kRowsBeside][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRowsBeside; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::zero();
    const T *a_k = a, *b_k = b;
    const auto step = [&]() __attribute__((always_inline)) {
      decltype(S::load(b)) b_kv[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) b_kv[v] = S::load(b_k + v * S::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRowsBeside; ++r) {
        const auto a_rk = S::set(a_k[r * a_row]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = S::fma(a_rk, b_kv[v], sum[r][v]);
      }
      ++a_k;
      b_k += b_row;
    };
    int64_t left = depth;
    if (first > 0) {
      for_each_vector([&](auto v) __attribute__((always_inline)) {
        for (int piece = 0; piece < kPiecesBeside; ++piece) {
          for (int64_t s = 0; s < steps_of_piece; ++s) step();
          work(first - kRowsBeside, v, piece);
        }
      });
      left -= steps_of_piece * kVectors * kPiecesBeside;
    }
    for (; left > 0; --left) step();
    take(first, sum);
  }
  for_each_vector([&](auto v) __attribute__((always_inline)) {
    for (int piece = 0; piece < kPiecesBeside; ++piece) work(rows - kRowsBeside, v, piece);
  });
}

}  // namespace qkv::kernels::QKV_ISA
