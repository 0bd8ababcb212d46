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

template <class T>
struct InNumbers {
  using Number = T;
  using Factor = T;
  static constexpr bool kInNumbers = true;
  static constexpr bool kScales = true;  // columns, before they are multiplied

  /// How many factors a product of this width has, and columns of it.
  static int64_t depth(int64_t width) { return width; }
  static int64_t column_factors(int64_t width, int64_t rows) { return width * rows; }

  template <int kRows>
  static void pack_columns(const RowTile<kRows>& tile, const Operand<const T>& y, int64_t width,
                           T scale, Storage storage, T* to) {
    tile.pack_transposed(y, width, scale, to, storage);
  }

  /// The lines of a block of keys; `to` is for copies.
  template <int kRows>
  static Rows<T> lines(const RowTile<kRows>& tile, const Operand<const T>& x, Storage storage,
                       int64_t first_key, int64_t count, int64_t width, T* to) {
    return rows_of_block(tile, x, storage, first_key, count, width, to);
  }
};

}  // namespace qkv::kernels::QKV_ISA
