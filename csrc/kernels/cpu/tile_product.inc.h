#pragma once

#include "kernels/params.h"

// The one matrix product behind every kernel here:
//
//     C[r][c] (+)= sum over k of A(r, k) · B[k][c]        A(r, k) = a[r · a_row + k · a_step]
//
//             k ->                c -> (vectors)
//     A  r  [ a a a ]     B  k [ bbbb bbbb bbbb ]     each a is broadcast to a vector
//
// A is read where it lies (rows or columns of K, V, dS), one scalar at a time, and the load
// broadcasts for free; B and C are dense tiles. So K and V are never packed or transposed. 4 x 3
// accumulators reach 99 % of the FMA peak on Zen 4, 8 x 3 reach 97 %, as do 4 x 3 with AVX2's 16
// registers.
//
// Each element of A · B is one chain of fused multiply-adds in the order of k: its bits do not
// depend on how the tile is cut.

namespace qkv::kernels::QKV_ISA {

/// A stride of 1 that the compiler can see.
struct UnitStride {
  constexpr operator int64_t() const { return 1; }
};

/// A number known at compile time, to be handed to a lambda.
template <int kValue>
struct Constant {
  constexpr int operator()() const { return kValue; }
};

/// Calls f with what the condition is.
template <class F>
QKV_INLINE void with_constant(bool condition, F f) {
  condition ? f(Constant<1>{}) : f(Constant<0>{});
}

/// A finish that takes vectors one by one, as f(r, v, x).
template <class F>
struct EachVector {
  F f;

  template <class Number, int kRows, int kVectors>
  QKV_INLINE void operator()(int64_t first, Number (&x)[kRows][kVectors]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) f(first + r, v, x[r][v]);
  }
};

template <class F>
QKV_INLINE EachVector<F> each_vector(F f) {
  return {f};
}

/// One that takes a few rows of one vector after the other, as f(r, v, x) with x[rows]: where each
/// operation on a vector waits for the one before it, several vectors fill the time.
template <class F>
struct FewAtATime {
  static constexpr int kMost = 4;

  F f;

  template <class Number, int kRows, int kVectors>
  QKV_INLINE void operator()(int64_t first, Number (&x)[kRows][kVectors]) const {
    constexpr int kCount = kRows < kMost ? kRows : kMost;
    static_assert(kRows % kCount == 0);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r += kCount) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Number few[kCount];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) few[i] = x[r + i][v];
        f(first + r, v, few);
      }
    }
  }
};

template <class F>
QKV_INLINE FewAtATime<F> few_at_a_time(F f) {
  return {f};
}

/// Rows first .. first + kRows of C, kVectors vectors wide. `start(r, v)` gives the first value of
/// a vector of C, `finish(first, x)` takes the last ones, all at once: x[kRows][kVectors].
template <class T, int kRows, int kVectors, class RowStride, class StepStride, class Start,
          class Finish>
QKV_INLINE void product_of_rows(int64_t first, int64_t depth, const T* a, RowStride a_row,
                                StepStride a_step, const T* b, int64_t b_row, Start start,
                                Finish finish) {
  using S = Simd<T>;
  a += first * a_row;
  typename S::Number sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = start(first + r, v);
  for (int64_t k = 0; k < depth; ++k) {
    decltype(S::load(b)) b_k[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b_k[v] = S::load(b + k * b_row + v * S::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto a_rk = S::set(a[r * a_row + k * a_step]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::fma(a_rk, b_k[v], sum[r][v]);
    }
  }
  finish(first, sum);
}

/// Rows first .. rows of C, in steps of kRows, the rest in steps of its halves.
template <class T, int kRows, int kVectors, class RowStride, class StepStride, class Start,
          class Finish>
QKV_INLINE void tile_product(int64_t first, int64_t rows, int64_t depth, const T* a,
                             RowStride a_row, StepStride a_step, const T* b, int64_t b_row,
                             Start start, Finish finish) {
  for (; first + kRows <= rows; first += kRows) {
    product_of_rows<T, kRows, kVectors>(first, depth, a, a_row, a_step, b, b_row, start, finish);
  }
  if constexpr (kRows > 1) {
    tile_product<T, kRows / 2, kVectors>(first, rows, depth, a, a_row, a_step, b, b_row, start,
                                         finish);
  }
}

/// Rows of C that are summed together: one vector of each takes as many as hide the latency of a
/// multiply-add.
template <class T, int kVectors>
constexpr int rows_together() {
  constexpr int kRows = Simd<T>::kBroadcastRows;
  return kVectors == 1 && kRows < 8 ? 8 : kRows;
}

/// C = A · B, handed to `finish(first, x)`.
template <class T, int kVectors, class RowStride, class StepStride, class Finish>
QKV_INLINE void multiply(int64_t rows, int64_t depth, const T* a, RowStride a_row,
                         StepStride a_step, const T* b, int64_t b_row, Finish finish) {
  tile_product<T, rows_together<T, kVectors>(), kVectors>(
      0, rows, depth, a, a_row, a_step, b, b_row,
      [](int64_t, int) __attribute__((always_inline)) { return Simd<T>::zero(); }, finish);
}

/// Sums that a product is added to, `row` numbers from one row to the next.
template <class T>
struct Sums {
  T* first;
  int64_t row;
  bool has_any = true;  // else they are written

  Sums from(int64_t r, int64_t c) const { return {first + r * row + c, row, has_any}; }
};

/// C += A · B, summed before it is added: what is added up over many blocks of keys or
/// tiles of rows errs by their number and their size, not by the product of both.
template <class T, int kVectors, int kRows = rows_together<T, kVectors>(), class RowStride,
          class StepStride, class Sum>
QKV_INLINE void multiply_add(int64_t rows, int64_t depth, const T* a, RowStride a_row,
                             StepStride a_step, const T* b, int64_t b_row, Sums<Sum> c) {
  using S = Simd<Sum>;
  const auto product = [&](auto adds) __attribute__((always_inline)) {
    tile_product<T, kRows, kVectors>(
        0, rows, depth, a, a_row, a_step, b, b_row,
        [](int64_t, int) __attribute__((always_inline)) { return S::zero(); },
        each_vector([=](int64_t r, int v, typename S::Number x) __attribute__((always_inline)) {
          Sum* to = c.first + r * c.row + v * S::kWidth;
          // An addition takes no multiply-add's place where it has pipes of its own.
          S::store(to, adds() != 0 ? S::load(to) + x : x);
        }));
  };
  with_constant(c.has_any, product);
}

}  // namespace qkv::kernels::QKV_ISA
