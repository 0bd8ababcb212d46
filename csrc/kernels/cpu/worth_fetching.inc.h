#pragma once

#include "kernels/cpu/next_rows.inc.h"

// Whether rows of K and V that are read next are worth fetching. No bit of a result depends on it.
//
// On Intel's processors asking for rows takes more time than it saves where these are in the
// second-level cache, and where they are long with gaps between: it seems that the processor sees
// them coming. The bounds are those of a Granite Rapids (docs/experiments.md, "Few rows and
// decoding").

namespace qkv::kernels::QKV_ISA {

/// Of the kernels for Intel's processors: vectors as long, with as many sums in registers.
constexpr bool kIsForIntel = Simd<float>::kWidth == 16 && Simd<float>::kBroadcastRows == 8;

constexpr int64_t kBytesOfLongRow = 1024;

/// Of a key and its value.
template <class T>
inline int64_t bytes_of_stored_key(const Problem<T>& p) {
  const int64_t number = p.key_value_storage == Storage::kSame ? sizeof(T) : 2;
  return (p.head_dim + p.value_dim) * number;
}

/// For tiles.
template <class T>
inline bool is_worth_fetching(const Problem<T>& p) {
  return !kIsForIntel || bytes_of_stored_key(p) < 2 * kBytesOfLongRow;
}

/// For kRows rows of a head, as few as few_rows.inc.h takes: those of `keys` of the key/value head
/// that their tile belongs to, or none. With more than four, and where K and V lie in memory, it is
/// products or memory that take the time, not what asks for rows.
template <int kRows, class T, int kTileRows>
inline NextRows next_rows_of_few(const Problem<T>& p, const RowTile<kTileRows>& tile,
                                 const Operand<const T>& x, KeyRange keys, int64_t width) {
  NextRows rows = next_rows<T>(tile, x, p.key_value_storage, keys, width);
  if (!kIsForIntel) return rows;
  constexpr int64_t kMebi = int64_t{1} << 20;
  const int64_t all = p.batch * p.kv_heads * p.keys * bytes_of_stored_key(p);
  if (all <= kMebi) return {};
  const bool has_gaps = rows.stride > rows.width;
  if (kRows > 4 || all >= 64 * kMebi || !has_gaps) return rows;
  const bool is_converted = p.key_value_storage != Storage::kSame;
  if (rows.width >= kBytesOfLongRow / (is_converted || kRows > 2 ? 1 : 2)) return {};
  if (rows.width == 128) rows.width = 64;  // one line of two is as good, or better
  return rows;
}

}  // namespace qkv::kernels::QKV_ISA
