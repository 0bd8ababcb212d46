#pragma once

#include "kernels/band.h"
#include "kernels/cpu/row_tile.inc.h"

namespace qkv::kernels::QKV_ISA {

/// Rows of K or V that are read next, to be fetched while others are multiplied. K and V take
/// turns, so the processor itself does not see them coming. To the second-level cache: a block of
/// both fills the first.
struct NextRows {
  const char* first;
  int64_t stride;  // bytes from one to the next
  int64_t width;   // bytes of one
  int64_t count;

  const char* operator[](int64_t k) const { return first + k * stride; }

  /// Those of k .. k + some that there are.
  QKV_INLINE void fetch(int64_t k, int64_t some = 1) const {
    const int64_t end = k + some < count ? k + some : count;
    for (; k < end; ++k) {
      const char* row = (*this)[k];
      for (int64_t b = 0; b < width; b += 64) __builtin_prefetch(row + b, 0, 2);
    }
  }
};

/// What a forward tile reads after the scores of some keys: their values and the keys after them.
struct NextKeys {
  bool any;
  NextRows values;
  NextRows keys;

  QKV_INLINE void fetch(int64_t first, int count) const {
    if (!any) return;
    values.fetch(first, count);
    keys.fetch(first, count);
  }
};

/// Those that one of several passes over keys fetches, spread evenly over its keys: memory is not
/// asked for all of them in the first pass and for none in the others.
class ShareOfNextRows {
 public:
  ShareOfNextRows(const NextRows& rows, int pass, int passes) : rows_(rows), passes_(passes) {
    const int64_t begin = rows.count * pass / passes, end = rows.count * (pass + 1) / passes;
    rows_.first += begin * rows.stride;
    rows_.count = end - begin;
  }

  /// With each key that the pass takes in.
  QKV_INLINE void fetch_next() {
    if (++keys_ < passes_) return;
    keys_ = 0;
    rows_.fetch(fetched_++);
  }

 private:
  NextRows rows_;
  int passes_;
  int keys_ = 0;  // since the last that was fetched
  int64_t fetched_ = 0;
};

/// Those of a tile in one tensor.
struct NextRowsOfTile {
  const int64_t *head, *query;  // the tile's
  const char* first;
  int64_t head_stride, row_stride;  // bytes
  int64_t width;                    // bytes of one
  int64_t count;

  const char* operator[](int64_t r) const {
    return first + head[r] * head_stride + query[r] * row_stride;
  }
};

/// Rows fetched one cache line at a time, between pieces of other work, to the first-level cache or
/// to the second. Asked for many lines at once, memory keeps that work waiting.
template <class Rows, int kLevel = 1>
class LinesAhead {
 public:
  LinesAhead() : rows_{} {}  // of none
  explicit LinesAhead(const Rows& rows) : rows_(rows) {}

  /// How many lines there are, fetched or not.
  int64_t all() const { return rows_.count * ((rows_.width + 63) / 64); }

  QKV_INLINE void fetch_next() {
    if (row_ == rows_.count) return;
    __builtin_prefetch(rows_[row_] + byte_, 0, kLevel == 1 ? 3 : 2);
    if ((byte_ += 64) < rows_.width) return;
    byte_ = 0;
    ++row_;
  }

 private:
  Rows rows_;
  int64_t row_ = 0, byte_ = 0;
};

/// The rows of `keys` of a tile's key/value head, none if there are none.
template <class T, int kRows>
inline NextRows next_rows(const RowTile<kRows>& tile, const Operand<const T>& x, Storage storage,
                          KeyRange keys, int64_t width) {
  NextRows rows{};
  with_stored<T>(storage, [&](auto stored) {
    using Stored = decltype(stored);
    constexpr int64_t kBytes = sizeof(Stored);
    const Stored* head = tile.template stored_keys_of_head<Stored>(x);
    rows = {reinterpret_cast<const char*>(head + keys.begin * x.row_stride), x.row_stride * kBytes,
            width * kBytes, keys.end - keys.begin};
  });
  return rows;
}

/// A tile's rows in x, of these `width` columns from `first` on, as long as there is the tile.
template <int kRows, class Number>
inline NextRowsOfTile next_rows_of_tile(const RowTile<kRows>& tile, const Operand<Number>& x,
                                        Storage storage, int64_t width, int64_t first = 0) {
  const int64_t bytes = storage == Storage::kSame ? sizeof(Number) : 2;
  const int64_t offset = tile.batch.offset(x.batch_stride) + first;
  return {tile.head,
          tile.query,
          reinterpret_cast<const char*>(x.data) + offset * bytes,
          x.head_stride * bytes,
          x.row_stride * bytes,
          width * bytes,
          tile.rows};
}

using LinesOfTile = LinesAhead<NextRowsOfTile>;

template <int kRows, class Number>
inline LinesOfTile lines_of_tile(const RowTile<kRows>& tile, const Operand<Number>& x,
                                 Storage storage, int64_t width) {
  return LinesOfTile(next_rows_of_tile(tile, x, storage, width));
}

}  // namespace qkv::kernels::QKV_ISA
