#pragma once

#include "kernels/cpu/backward_tile.inc.h"
#include "kernels/cpu/mask_sums.inc.h"
#include "kernels/mask_broadcast.h"

// The gradient of an additive mask is dS itself, summed over the dimensions in which the mask is
// broadcast. The backward's splits add it where that keeps enough of them apart (cpu/gradients.h),
// with the same bits. Else this second pass over the scores (two products more) owns elements of
// the gradient rather than keys, so that it needs no memory but the gradient, whatever is
// broadcast:
//
//     grad_mask (b, h, i, j) += dS (b', h', i', j')  for all (b', h', i', j') that read element
//                                                    (b, h, i, j) of the mask, in a fixed order
//
// A unit of work owns one (b, h) of the mask and, if the mask has rows, one tile of rows, else a
// few blocks of keys.

namespace qkv::kernels::QKV_ISA {

template <class T>
constexpr int kMaskGradientRows = BackwardRows<T, kBackwardVectors>::kRows;
constexpr int64_t kMaskGradientKeys = 4 * kBackwardBlockKeys;  // of a unit without rows

/// How many units there are of each kind; a dimension that is summed over has one.
struct MaskGradientUnits {
  int64_t batches;
  int64_t heads;
  int64_t row_tiles;
  int64_t key_ranges;

  template <class T>
  static MaskGradientUnits of(const Problem<T>& p, const Operand<T>& mask) {
    MaskGradientUnits units{batches_of_mask(p, mask), 1, 1, 1};
    if (mask.head_stride != 0) units.heads = p.query_heads;
    if (mask.row_stride != 0) {
      units.row_tiles = (p.queries + kMaskGradientRows<T> - 1) / kMaskGradientRows<T>;
    } else if (mask.column_stride != 0) {
      units.key_ranges = (p.keys + kMaskGradientKeys - 1) / kMaskGradientKeys;
    }
    return units;
  }

  int64_t count() const { return batches * heads * row_tiles * key_ranges; }
};

template <class T>
inline int64_t mask_gradient_units(const Problem<T>& problem, const Operand<T>& grad_mask) {
  return MaskGradientUnits::of(problem, grad_mask).count();
}

/// f(tile, keys): rows of a query head, and the keys that they may see, which read elements of a
/// unit, in the order in which these are summed.
template <class T, class F>
inline void for_each_tile_of_mask(const Problem<T>& p, const Operand<T>& mask, int64_t unit, F f) {
  constexpr int kRows = kMaskGradientRows<T>;
  const auto units = MaskGradientUnits::of(p, mask);
  const int64_t key_range = unit % units.key_ranges;
  unit /= units.key_ranges;
  const int64_t row_tile = unit % units.row_tiles;
  unit /= units.row_tiles;
  const int64_t mask_head = unit % units.heads;
  const int64_t mask_batch = unit / units.heads;

  const int64_t group = p.query_heads / p.kv_heads;
  const int64_t summed_batches = p.batch / units.batches;
  const int64_t first_head = units.heads > 1 ? mask_head : 0;
  const int64_t end_head = units.heads > 1 ? mask_head + 1 : p.query_heads;
  const int64_t first_row = units.row_tiles > 1 ? row_tile * kRows : 0;
  const int64_t end_row = units.row_tiles > 1 ? first_row + 1 : p.queries;
  const KeyRange keys = units.key_ranges > 1 ? KeyRange{key_range * kMaskGradientKeys,
                                                        (key_range + 1) * kMaskGradientKeys}
                                             : KeyRange{0, p.keys};

  for (int64_t b = 0; b < summed_batches; ++b) {
    const int64_t batch = batch_of_mask(p, mask, mask_batch, b);
    for (int64_t head = first_head; head < end_head; ++head) {
      for (int64_t row = first_row; row < end_row; row += kRows) {
        const auto tile = RowTile<kRows>::make(p, batch, head / group, head, 1, row);
        const KeyRange seen = keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys);
        if (const KeyRange range = seen.intersection(keys); !range.empty()) f(tile, range);
      }
    }
  }
}

/// Sums of `values`, [keys][rows], which work.load_block computes for each of its tiles.
template <class T, class Work>
inline void sum_over_mask(const Problem<T>& p, const Operand<T>& mask, int64_t unit, Work& work,
                          const T* values) {
  for_each_tile_of_mask(p, mask, unit, [&](const auto& tile, KeyRange range) {
    work.tile = tile;
    work.load_rows();
    for (int64_t n = first_of_eight(range.begin); n < range.end; n += kBackwardBlockKeys) {
      const int block =
          range.end - n < kBackwardBlockKeys ? static_cast<int>(range.end - n) : kBackwardBlockKeys;
      if (work.load_block(n, block) == TileState::kEmpty) continue;
      add_to_mask<kMaskGradientRows<T>>(values, work.tile, mask, n, block);
    }
  });
}

template <class Scores, class T>
inline int64_t mask_gradient_scratch_bytes(const BackwardParams<T>& params) {
  return BackwardTile<Scores, kBackwardVectors>::scratch_numbers(params.problem) *
         static_cast<int64_t>(sizeof(T));
}

template <class Scores, class T>
inline void mask_gradient(const BackwardParams<T>& params, int64_t unit, void* scratch) {
  BackwardTile<Scores, kBackwardVectors> work(params, static_cast<T*>(scratch));
  sum_over_mask(work.p, params.grad_mask, unit, work, work.ds_tile);
}

}  // namespace qkv::kernels::QKV_ISA
