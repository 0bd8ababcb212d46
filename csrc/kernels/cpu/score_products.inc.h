#pragma once

#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// The products X Yᵀ of derivatives (scores, dP and their tangents), for X that keys have and Y that
// rows have:
//
//     keys [ rows -> ] = lines of X  keys [ columns -> ]   x   columns of Y  columns [ rows -> ]
//
// Here in the numbers that sums are taken in; in_pairs.inc.h takes two bfloat16 at a time.

namespace qkv::kernels::QKV_ISA {

/// So much of the depth is multiplied at a time, for the columns of three vectors of rows are to
/// stay in a first-level cache from one key to the next. They share its lines with those of other
/// rows.
constexpr int64_t kDepthAtATime = 128;

/// C[keys][rows] (+)= lines of X · columns of Y, for kVectors vectors of rows, `row` numbers apart
/// from column to column and from key to key. kScaled: the sums are multiplied by scale. with_key()
/// is called once for each key.
template <int kVectors, bool kScaled, class T, class Factor, class WithKey>
QKV_INLINE void multiply_lines(int64_t keys, int64_t depth, Rows<Factor> lines,
                               const Factor* columns, int64_t row, bool add, T scale, T* c,
                               WithKey with_key) {
  using S = Simd<T>;
  for (int64_t left = depth;;) {
    const int64_t now = left < kDepthAtATime ? left : kDepthAtATime;
    const bool is_last = now == left;
    const auto factor = S::set(is_last ? scale : T(1));
    tile_product<Factor, rows_together<Factor, kVectors>(), kVectors>(
        0, keys, now, lines.first, lines.stride, UnitStride{}, columns, row,
        [=](int64_t k, int v) __attribute__((always_inline)) {
          return add ? S::load(c + k * row + v * S::kWidth) : S::zero();
        },
        each_vector([=](int64_t k, int v, typename S::Number sum) __attribute__((always_inline)) {
          if (v == 0 && is_last) with_key();
          S::store(c + k * row + v * S::kWidth, kScaled ? sum * factor : sum);
        }));
    if ((left -= now) == 0) return;
    lines.first += now;
    columns += now * row;
    add = true;
  }
}

/// OfWeights is the exponential that a backward makes weights with, kBeside says whether it does so
/// beside products where it can.
template <class T, class OfWeights = ExpOfNonpositive<T>, bool kBeside = false>
struct InNumbers {
  using Number = T;
  using Factor = T;
  using Exp = OfWeights;
  static constexpr bool kWeighsBeside = kBeside;
  static constexpr bool kInNumbers = true;
  static constexpr bool kScales = true;  // columns, before they are multiplied

  /// How many factors a product of this width has, and columns of it.
  static int64_t depth(int64_t width) { return width; }
  static int64_t column_factors(int64_t width, int64_t rows) { return width * rows; }

  template <int kRows>
  static void pack_columns(const RowTile<kRows>& tile, const Operand<const T>& y, int64_t width,
                           T scale, Storage storage, T* to, int lanes = kRows) {
    tile.pack_transposed(y, width, scale, to, storage, lanes);
  }

  /// The lines of a block of keys; `to` is for copies.
  template <int kRows>
  static Rows<T> lines(const RowTile<kRows>& tile, const Operand<const T>& x, Storage storage,
                       int64_t first_key, int64_t count, int64_t width, T* to) {
    return rows_of_block(tile, x, storage, first_key, count, width, to);
  }
};

}  // namespace qkv::kernels::QKV_ISA
