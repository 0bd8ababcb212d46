#pragma once

#include "kernels/cpu/exp_by_table.inc.h"
#include "kernels/cpu/half_tile.inc.h"
#include "kernels/cpu/score_products.inc.h"

namespace qkv::kernels::QKV_ISA {

/// Products X Yᵀ of bfloat16, two columns at a time, summed in float32 (score_products.inc.h).
/// Nothing is rounded.
struct InPairs {
  using Number = float;
  using Factor = BFloat16Pair;
  using Exp = ExpByTable;  // as for InNumbers
  static constexpr bool kWeighsBeside = true;
  static constexpr bool kInNumbers = false;
  static constexpr bool kScales = false;

  static int64_t depth(int64_t width) { return (width + 1) / 2; }
  static int64_t column_factors(int64_t width, int64_t rows) { return column_pairs(width, rows); }

  template <int kRows>
  static void pack_columns(const RowTile<kRows>& tile, const Operand<const float>& y, int64_t width,
                           float /*scale*/, Storage /*storage*/, BFloat16Pair* to,
                           int lanes = kRows) {
    pack_columns_in_pairs(tile, y, width, to, lanes);
  }

  /// Where they lie, if all begin with a pair; copies end with a zero if the width is odd.
  template <int kRows>
  static Rows<BFloat16Pair> lines(const RowTile<kRows>& tile, const Operand<const float>& x,
                                  Storage /*storage*/, int64_t first_key, int64_t count,
                                  int64_t width, BFloat16Pair* to) {
    const int64_t stride = x.row_stride, pairs = depth(width);
    const BFloat16* from = tile.template stored_keys_of_head<BFloat16>(x) + first_key * stride;
    if (width % 2 == 0 && stride % 2 == 0) return {in_pairs(from), stride / 2};
    for (int64_t k = 0; k < count; ++k, from += stride) {
      for (int64_t d = 0; d < width; d += 32) {
        const auto numbers = _mm512_maskz_loadu_epi16(first_lanes_of_32(width - d), from + d);
        _mm512_mask_storeu_epi32(to + k * pairs + d / 2, first_lanes(pairs - d / 2), numbers);
      }
    }
    return {to, pairs};
  }
};

}  // namespace qkv::kernels::QKV_ISA
