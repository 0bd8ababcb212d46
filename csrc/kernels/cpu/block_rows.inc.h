#pragma once

#include "kernels/band.h"
#include "kernels/cpu/row_tile.inc.h"

// Rows of K or V, of a block of keys or of all that several tiles take in, and those of a tile:
// where they lie, or copied.
//
// Those stored in 16 bits are converted. Those a multiple of 1024 bytes apart, as the rows of a
// head in a tensor (B, N, H, D) often are, are spread for a product that reads a few columns at a
// time: it comes back to each of their cache lines and needs all of them to stay, but they share a
// sixteenth of the sets of a first-level cache (64 sets of 64 bytes), or fewer.

namespace qkv::kernels::QKV_ISA {

template <class T>
struct Rows {
  const T* first;
  int64_t stride;

  Rows from(int64_t row) const { return {first + row * stride, stride}; }
};

template <class T>
constexpr bool shares_sets(int64_t stride) {
  return stride != 0 && stride * static_cast<int64_t>(sizeof(T)) % 1024 == 0;
}

/// How far apart copies of rows of `width` numbers are: whole vectors, over all sets.
template <class T>
constexpr int64_t spread_row(int64_t width) {
  const int64_t whole = (width + Simd<T>::kWidth - 1) / Simd<T>::kWidth * Simd<T>::kWidth;
  return shares_sets<T>(whole) ? whole + 64 / static_cast<int64_t>(sizeof(T)) : whole;
}

template <class T, class Stored>
inline Rows<T> copy_rows(const Stored* from, int64_t stride, int64_t rows, int64_t width, T* to) {
  using S = Simd<T>;
  const Rows<T> copies{to, spread_row<T>(width)};
  for (int64_t r = 0; r < rows; ++r, from += stride, to += copies.stride) {
    int64_t d = 0;
    for (; d + S::kWidth <= width; d += S::kWidth) S::store(to + d, load_stored<T>(from + d));
    if (d < width) S::store(to + d, load_first<T>(from + d, width - d));
  }
  return copies;
}

/// Rows that a product may read a few columns at a time; `to` is for their copies.
template <class T>
inline Rows<T> spread_rows(Rows<T> rows, int64_t count, int64_t width, T* to) {
  return shares_sets<T>(rows.stride) ? copy_rows<T>(rows.first, rows.stride, count, width, to)
                                     : rows;
}

/// Rows first .. first + count of a tile's key/value head as numbers of T; `to` is for their
/// copies.
template <class T, int kRows>
QKV_ONE_COPY Rows<T> rows_of_block(const RowTile<kRows>& tile, const Operand<const T>& x,
                                   Storage storage, int64_t first, int64_t count, int64_t width,
                                   T* to) {
  Rows<T> rows{};
  with_stored<T>(storage, [&](auto stored) {
    using Stored = decltype(stored);
    const Stored* from = tile.template stored_keys_of_head<Stored>(x) + first * x.row_stride;
    if constexpr (sizeof(Stored) == sizeof(T)) {
      rows = {from, x.row_stride};
    } else {
      rows = copy_rows<T>(from, x.row_stride, count, width, to);
    }
  });
  return rows;
}

/// Whether rows that are read several times are better copied before: converted, or spread.
template <class T>
inline bool wants_copies(const Operand<const T>& x, Storage storage) {
  return storage != Storage::kSame || shares_sets<T>(x.row_stride);
}

/// The keys that copies are made of: all that some row sees, from where blocks of them may begin.
template <class T>
inline KeyRange keys_to_copy(const Problem<T>& p) {
  const KeyRange seen = keys_of_any(p.band, 0, p.queries - 1, p.keys);
  return {first_of_eight(seen.begin), seen.end};
}

/// rows_of_block as copies, if they are wanted.
template <class T, int kRows>
inline Rows<T> copies_of_rows(const RowTile<kRows>& tile, const Operand<const T>& x,
                              Storage storage, int64_t first, int64_t count, int64_t width, T* to) {
  const Rows<T> rows = rows_of_block(tile, x, storage, first, count, width, to);
  return spread_rows<T>(rows, count, width, to);
}

/// The rows of a tile, for a product that reads them by the vector: where they lie, if it is one
/// after the other, in whole vectors; else copies in `to`, with zeros after the last column.
template <class T, int kRows>
QKV_ONE_COPY Rows<T> rows_of_tile(const RowTile<kRows>& tile, const Operand<const T>& x,
                                  Storage storage, int64_t width, T* to) {
  const int64_t row = spread_row<T>(width);
  if (storage == Storage::kSame && x.row_stride == row && row == width) {
    const T* first = tile.row(x, 0);
    // Those of grouped heads take turns.
    const bool of_one_head = tile.rows == 1 || tile.head[0] == tile.head[1];
    const bool by_vectors =
        reinterpret_cast<uintptr_t>(first) % sizeof(typename Simd<T>::Number) == 0;
    if (of_one_head && by_vectors) return {first, row};
  }
  tile.pack(x, width, T(1), to, row, storage);
  return {to, row};
}

}  // namespace qkv::kernels::QKV_ISA
