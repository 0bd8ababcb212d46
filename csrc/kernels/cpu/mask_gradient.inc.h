#pragma once

#include "kernels/cpu/backward_tile.inc.h"
#include "kernels/cpu/transpose.inc.h"
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

/// Whether the gradient of a mask has no rows or no columns, so that many pairs add to each
/// element. These are numbers of double then, whatever T is.
template <class T>
inline bool is_line(const Operand<T>& mask) {
  return mask.row_stride == 0 || mask.column_stride == 0;
}

/// Sums in double, one for each lane of a vector of T.
template <class T>
class SumsOfLanes {
 public:
  static constexpr int kWidth = Simd<T>::kWidth;

  explicit SumsOfLanes(const double* from) { __builtin_memcpy(sums_, from, sizeof(sums_)); }

  QKV_INLINE void add(const T* from) {
    for (int i = 0; i < kParts; ++i) {
      Part x;
      __builtin_memcpy(&x, from + i * kWidth / kParts, sizeof(x));
      sums_[i] += __builtin_convertvector(x, Sums);
    }
  }

  void store(double* to) const { __builtin_memcpy(to, sums_, sizeof(sums_)); }

 private:
  // The compiler's own vectors, of which those of double are as long as Simd's.
  static constexpr int kParts = sizeof(double) / sizeof(T);
  typedef T Part __attribute__((vector_size(kWidth / kParts * sizeof(T))));
  typedef double Sums __attribute__((vector_size(kWidth / kParts * sizeof(double))));
  Sums sums_[kParts];
};

/// mask (key first_key + k) += values[k][r], row after row.
template <class T, int kRows>
inline void add_to_line_of_keys(const T* values, const RowTile<kRows>& tile, const Operand<T>& mask,
                                int64_t first_key, int keys) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  double* const line = tile.template stored_row<double>(mask, 0) + first_key * mask.column_stride;
  const int whole = mask.column_stride == 1 ? keys / kWidth * kWidth : 0;
  for (int k = 0; k < whole; k += kWidth) {
    SumsOfLanes<T> sums(line + k);
    for (int r = 0; r < tile.rows; r += kWidth) {
      typename S::Number square[kWidth];
      alignas(64) T of_rows[kWidth][kWidth];
#pragma GCC unroll 16
      for (int c = 0; c < kWidth; ++c) square[c] = S::load(values + (k + c) * kRows + r);
      transpose<T>(square);
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) S::store(of_rows[l], square[l]);
      for (int l = 0; l < kWidth && r + l < tile.rows; ++l) sums.add(of_rows[l]);
    }
    sums.store(line + k);
  }
  for (int k = whole; k < keys; ++k) {
    double sum = line[k * mask.column_stride];
    for (int r = 0; r < tile.rows; ++r) sum += static_cast<double>(values[k * kRows + r]);
    line[k * mask.column_stride] = sum;
  }
}

/// mask (row r) += values[k][r], key after key; if it has no rows, all add to one element.
template <class T, int kRows>
inline void add_to_line_of_rows(const T* values, const RowTile<kRows>& tile, const Operand<T>& mask,
                                int keys) {
  constexpr int kWidth = Simd<T>::kWidth;
  const bool has_rows = mask.row_stride != 0;
  for (int r = 0; r < tile.rows; r += kWidth) {
    const int lanes = tile.rows - r < kWidth ? tile.rows - r : kWidth;
    double sums[kWidth] = {};
    for (int l = 0; has_rows && l < lanes; ++l) {
      sums[l] = *tile.template stored_row<double>(mask, r + l);
    }
    SumsOfLanes<T> of_lanes(sums);
    for (int k = 0; k < keys; ++k) of_lanes.add(values + k * kRows + r);
    of_lanes.store(sums);
    for (int l = 0; l < lanes; ++l) {
      double* const to = tile.template stored_row<double>(mask, r + l);
      *to = has_rows ? sums[l] : *to + sums[l];
    }
  }
}

/// mask (row r, key first_key + k) += values[k][r]. Each element takes the rows and the keys that
/// it is broadcast to in their order. A tile whose rows are of several heads has a mask with both.
template <class T, int kRows>
inline void add_to_mask(const T* values, const RowTile<kRows>& tile, const Operand<T>& mask,
                        int64_t first_key, int keys) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  if (is_line(mask)) {
    return mask.column_stride == 0 ? add_to_line_of_rows(values, tile, mask, keys)
                                   : add_to_line_of_keys(values, tile, mask, first_key, keys);
  }
  const int whole = mask.column_stride == 1 ? keys / kWidth * kWidth : 0;
  const int whole_rows = tile.rows / kWidth * kWidth;
  const auto add_number = [&](int r, int k) {
    tile.row(mask, r)[(first_key + k) * mask.column_stride] += values[k * kRows + r];
  };
  for (int r = 0; r < whole_rows; r += kWidth) {
    T* rows[kWidth];
    for (int l = 0; l < kWidth; ++l) rows[l] = tile.row(mask, r + l) + first_key;
    for (int k = 0; k < whole; k += kWidth) {
      typename S::Number square[kWidth];
#pragma GCC unroll 16
      for (int c = 0; c < kWidth; ++c) square[c] = S::load(values + (k + c) * kRows + r);
      transpose<T>(square);
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) S::store(rows[l] + k, S::load(rows[l] + k) + square[l]);
    }
  }
  for (int r = 0; r < tile.rows; ++r) {
    for (int k = r < whole_rows ? whole : 0; k < keys; ++k) add_number(r, k);
  }
}

/// Sums of `values`, [keys][rows], which work.load_block computes for each of its tiles.
template <class T, class Work>
inline void sum_over_mask(const Problem<T>& p, const Operand<T>& mask, int64_t unit, Work& work,
                          const T* values) {
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
        work.tile = RowTile<kRows>::make(p, batch, head / group, head, 1, row);
        const KeyRange range = work.keys_of_rows().intersection(keys);
        if (range.empty()) continue;
        work.load_rows();
        for (int64_t n = first_of_eight(range.begin); n < range.end; n += kBackwardBlockKeys) {
          const int block = range.end - n < kBackwardBlockKeys ? static_cast<int>(range.end - n)
                                                               : kBackwardBlockKeys;
          if (work.load_block(n, block) == TileState::kEmpty) continue;
          add_to_mask(values, work.tile, mask, n, block);
        }
      }
    }
  }
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
