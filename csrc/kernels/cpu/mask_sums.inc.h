#pragma once

#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/transpose.inc.h"

// What the pairs of a tile add to the gradient of an additive mask, whose elements take those that
// read them:
//
//     dS  keys [ rows -> ]   to   mask  rows [ keys -> ]   in squares that are transposed
//                            or         [ keys -> ], [ rows ] or one number, in double
//
// However tiles and blocks are cut, an element takes its pairs one by one in their order.

namespace qkv::kernels::QKV_ISA {

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
template <int kStride, class T, int kRows>
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
      for (int c = 0; c < kWidth; ++c) square[c] = S::load(values + (k + c) * kStride + r);
      transpose<T>(square);
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) S::store(of_rows[l], square[l]);
      for (int l = 0; l < kWidth && r + l < tile.rows; ++l) sums.add(of_rows[l]);
    }
    sums.store(line + k);
  }
  for (int k = whole; k < keys; ++k) {
    double sum = line[k * mask.column_stride];
    for (int r = 0; r < tile.rows; ++r) sum += static_cast<double>(values[k * kStride + r]);
    line[k * mask.column_stride] = sum;
  }
}

/// mask (row r) += values[k][r], key after key; if it has no rows, all add to one element.
template <int kStride, class T, int kRows>
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
    for (int k = 0; k < keys; ++k) of_lanes.add(values + k * kStride + r);
    of_lanes.store(sums);
    for (int l = 0; l < lanes; ++l) {
      double* const to = tile.template stored_row<double>(mask, r + l);
      *to = has_rows ? sums[l] : *to + sums[l];
    }
  }
}

/// mask (row r, key first_key + k) += values[k][r], of which each key has kStride. Each element
/// takes the rows and the keys that it is broadcast to in their order. A tile whose rows are of
/// several heads has a mask with both.
template <int kStride, class T, int kRows>
inline void add_to_mask(const T* values, const RowTile<kRows>& tile, const Operand<T>& mask,
                        int64_t first_key, int keys) {
  using S = Simd<T>;
  constexpr int kWidth = S::kWidth;
  if (is_line(mask)) {
    return mask.column_stride == 0
               ? add_to_line_of_rows<kStride>(values, tile, mask, keys)
               : add_to_line_of_keys<kStride>(values, tile, mask, first_key, keys);
  }
  if (mask.column_stride != 1) {
    for (int r = 0; r < tile.rows; ++r) {
      T* const row = tile.row(mask, r) + first_key * mask.column_stride;
      for (int k = 0; k < keys; ++k) row[k * mask.column_stride] += values[k * kStride + r];
    }
    return;
  }
  for (int r = 0; r < tile.rows; r += kWidth) {
    const int lanes = tile.rows - r < kWidth ? tile.rows - r : kWidth;
    T* rows[kWidth];
    for (int l = 0; l < lanes; ++l) rows[l] = tile.row(mask, r + l) + first_key;
    for (int k = 0; k < keys; k += kWidth) {
      const int columns = keys - k < kWidth ? keys - k : kWidth;
      const T* const of_key = values + k * kStride + r;
      typename S::Number square[kWidth];
      if (columns == kWidth) {
#pragma GCC unroll 16
        for (int c = 0; c < kWidth; ++c) square[c] = S::load(of_key + c * kStride);
      } else {
        for (int c = 0; c < kWidth; ++c) {
          square[c] = c < columns ? S::load(of_key + c * kStride) : S::zero();
        }
      }
      transpose<T>(square);
      if (lanes == kWidth && columns == kWidth) {
#pragma GCC unroll 16
        for (int l = 0; l < kWidth; ++l) S::store(rows[l] + k, S::load(rows[l] + k) + square[l]);
        continue;
      }
      alignas(64) T of_rows[kWidth][kWidth];
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) S::store(of_rows[l], square[l]);
      for (int l = 0; l < lanes; ++l) {
        T* const to = rows[l] + k;
        store_first<T>(to, S::load(of_rows[l]) + load_first<T>(to, columns), columns);
      }
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
