#pragma once

#include "kernels/cuda/simt/tile.cuh"

// What a block works on, and how many such units a problem has.

namespace qkv::kernels::simt {

/// Up to so many rows of a key/value head take the kernel for few rows.
constexpr int64_t kMostFewRowsOfHead = 16;

/// A grid holds 2^31 - 1 blocks; kernels walk over what is more.
inline int64_t blocks_of(int64_t units) { return units < 0x7fffffff ? units : 0x7fffffff; }

/// Up to kRows packed rows of a head of key and value, up to kWidth columns of their results, and
/// one of the ranges ("splits") that the keys are cut into. Tiles of rows come last first: under a
/// causal mask the last are the longest.
template <int kRows, int kWidth>
struct RowUnit {
  int64_t head;  // of key and value, in the batch
  int64_t batch;
  int64_t kv_head;
  int64_t split;
  int64_t chunk;
  int64_t first_column;
  PackedRows packed;
  int64_t first_row;
  int rows;

  template <class T>
  static QKV_INLINE int64_t count(const Problem<T>& p, int64_t columns, int64_t splits = 1) {
    return p.batch * p.kv_heads * column_chunks(columns, kWidth) * splits *
           ceil_divide(rows_of_kv_head(p), kRows);
  }

  template <class T>
  QKV_DEVICE RowUnit(const Problem<T>& p, int64_t unit, int64_t columns, int64_t splits = 1) {
    const int64_t tiles = ceil_divide(rows_of_kv_head(p), kRows);
    const int64_t chunks = column_chunks(columns, kWidth);
    const int64_t tile = tiles - 1 - unit % tiles;
    unit /= tiles;
    split = unit % splits;
    unit /= splits;
    chunk = unit % chunks;
    head = unit / chunks;
    batch = head / p.kv_heads;
    kv_head = head % p.kv_heads;
    first_column = chunk * kWidth;
    packed = rows_of_kv_head(p, kv_head);
    first_row = tile * kRows;
    rows = at_most(kRows, packed.count - first_row);
  }

  /// The keys that some row sees, by the band.
  template <class T>
  QKV_DEVICE KeyRange keys_of_any(const Problem<T>& p) const {
    return packed.keys_of_any(p, first_row, rows);
  }

  /// add(first, keys, partial) for each tile of kOthers keys that has some of `any`, none if it is
  /// empty. Partial: not every pair of it is kept, as by the band or where something `masks`. end()
  /// after each group.
  template <class T, class Add, class End>
  QKV_DEVICE void for_each_tile(const Problem<T>& p, KeyRange any, bool masks, const Add& add,
                                const End& end) const {
    if (any.empty()) return;
    const KeyRange all = packed.keys_of_all(p, first_row, rows);
    for (int64_t n = any.begin - any.begin % kOthers; n < any.end; end()) {
      for (const int64_t stop = end_of_group(n, any.end); n < stop; n += kOthers) {
        const int keys = at_most(kOthers, any.end - n);
        add(n, keys, rows < kRows || keys < kOthers || masks || !all.contains({n, n + kOthers}));
      }
    }
  }
};

/// Up to kKeys keys of a head, and up to kWidth columns of their gradients. Tiles come in order:
/// under a causal mask the first are the longest.
template <int kKeys, int kWidth>
struct KeyUnit {
  int64_t batch;
  int64_t kv_head;
  int64_t first_column;
  PackedRows packed;  // that may see the keys
  int64_t first_key;
  int keys;

  template <class T>
  static QKV_INLINE int64_t count(const Problem<T>& p, int64_t columns) {
    return p.batch * p.kv_heads * column_chunks(columns, kWidth) * ceil_divide(p.keys, kKeys);
  }

  template <class T>
  QKV_DEVICE KeyUnit(const Problem<T>& p, int64_t unit, int64_t columns) {
    const int64_t tiles = ceil_divide(p.keys, kKeys), chunks = column_chunks(columns, kWidth);
    const int64_t tile = unit % tiles;
    unit /= tiles;
    first_column = unit % chunks * kWidth;
    const int64_t head = unit / chunks;
    batch = head / p.kv_heads;
    kv_head = head % p.kv_heads;
    packed = rows_of_kv_head(p, kv_head);
    first_key = tile * kKeys;
    keys = at_most(kKeys, p.keys - first_key);
  }

  QKV_DEVICE KeyRange range() const { return {first_key, first_key + keys}; }

  /// Whether some of the rows from first_row on see some of the keys, by the band.
  template <class T>
  QKV_DEVICE bool is_seen(const Problem<T>& p, int64_t first_row, int rows) const {
    return !packed.keys_of_any(p, first_row, rows).intersection(range()).empty();
  }

  /// Whether not every pair with these rows is kept; partial as above.
  template <class T>
  QKV_DEVICE bool is_partial(const Problem<T>& p, int64_t first_row, int rows, bool masks) const {
    return rows < kOthers || keys < kKeys || masks ||
           !packed.keys_of_all(p, first_row, rows).contains(range());
  }

  /// add(first, rows, partial) for each tile of kOthers rows of which some see some of the keys;
  /// partial and end() as above.
  template <class T, class Add, class End>
  QKV_DEVICE void for_each_tile(const Problem<T>& p, bool masks, const Add& add,
                                const End& end) const {
    for (int64_t first_row = 0; first_row < packed.count; end()) {
      const int64_t stop = end_of_group(first_row, packed.count);
      for (; first_row < stop; first_row += kOthers) {
        const int rows = at_most(kOthers, packed.count - first_row);
        if (!is_seen(p, first_row, rows)) continue;
        add(first_row, rows, is_partial(p, first_row, rows, masks));
      }
    }
  }
};

}  // namespace qkv::kernels::simt
