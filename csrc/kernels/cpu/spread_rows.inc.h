#pragma once

#include "kernels/cpu/row_tile.inc.h"

// A product that reads rows a few columns at a time comes back to each of their cache lines, and
// needs all of them to stay. Rows a multiple of 1024 bytes apart, as those of a head in a tensor
// (B, N, H, D) often are, share a sixteenth of the sets of a first-level cache (64 sets of 64
// bytes), or fewer: too few for a block of keys. They are copied to where their lines spread over
// all sets.

namespace qkv::kernels::QKV_ISA {

template <class T>
constexpr bool shares_sets(int64_t stride) {
  return stride * static_cast<int64_t>(sizeof(T)) % 1024 == 0;
}

/// How far apart rows of `width` numbers, whole vectors, are put.
template <class T>
constexpr int64_t spread_row(int64_t width) {
  const int64_t whole = (width + Simd<T>::kWidth - 1) / Simd<T>::kWidth * Simd<T>::kWidth;
  return shares_sets<T>(whole) ? whole + 64 / static_cast<int64_t>(sizeof(T)) : whole;
}

template <class T>
struct Rows {
  const T* first;
  int64_t stride;
};

/// Rows as they lie, or their copies at `to`.
template <class T>
inline Rows<T> spread_rows(Rows<T> from, int64_t rows, int64_t width, T* to) {
  using S = Simd<T>;
  if (!shares_sets<T>(from.stride)) return from;
  const int64_t stride = spread_row<T>(width);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = from.first + r * from.stride;
    int64_t d = 0;
    for (; d + S::kWidth <= width; d += S::kWidth) S::store(to + r * stride + d, S::load(row + d));
    for (; d < width; ++d) to[r * stride + d] = row[d];
  }
  return {to, stride};
}

/// Rows first .. first + rows of a tile's key/value head, converted at `to` if they are stored in
/// 16 bits. Copies are spread_row(width) apart.
template <class T, int kRows>
QKV_ONE_COPY Rows<T> rows_of_block(const RowTile<kRows>& tile, const Operand<const T>& x,
                                   Storage storage, int64_t first, int64_t rows, int64_t width,
                                   T* to) {
  using S = Simd<T>;
  Rows<T> result{nullptr, x.row_stride};
  with_stored<T>(storage, [&](auto stored) {
    using Stored = decltype(stored);
    const Stored* from = tile.template stored_keys_of_head<Stored>(x) + first * x.row_stride;
    if constexpr (sizeof(Stored) == sizeof(T)) {
      result.first = from;
    } else {
      result = {to, spread_row<T>(width)};
      for (int64_t r = 0; r < rows; ++r) {
        const Stored* row = from + r * x.row_stride;
        T* line = to + r * result.stride;
        int64_t d = 0;
        for (; d + S::kWidth <= width; d += S::kWidth) S::store(line + d, load_stored<T>(row + d));
        for (; d < width; ++d) line[d] = static_cast<T>(row[d]);
      }
    }
  });
  return result;
}

}  // namespace qkv::kernels::QKV_ISA
