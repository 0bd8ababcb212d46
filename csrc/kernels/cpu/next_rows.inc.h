#pragma once

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

  /// Those of k .. k + some that there are.
  QKV_INLINE void fetch(int64_t k, int64_t some = 1) const {
    const int64_t end = k + some < count ? k + some : count;
    const char* row = first + k * stride;
    for (; k < end; ++k, row += stride) {
      for (int64_t b = 0; b < width; b += 64) __builtin_prefetch(row + b, 0, 2);
    }
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

}  // namespace qkv::kernels::QKV_ISA
