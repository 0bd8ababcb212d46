#pragma once

#include "kernels/band.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// Which keys of a block the vectors of a tile's rows need, in the kernels of derivatives: all, or,
// where the edge of the band runs through the block, those that some row of a vector sees.
//
//     rows ->    0..15  16..31  32..47  48..63  64..79  80..95
//     keys 0      ###     ###     ###     ###     ###     ###     a strip: keys that the same
//         16       .      ###     ###     ###     ###     ###              vectors see
//         32       .       .      ###     ###     ###     ###     a part:  vectors that see the
//         ..                                                               same keys, up to 3
//
// Products write and read no more of a tile than that.

namespace qkv::kernels::QKV_ISA {

template <class T, int kVectors>
class SeenKeys {
 public:
  static constexpr int kWidth = Simd<T>::kWidth;
  static constexpr int kRows = kVectors * kWidth;
  static constexpr int kPartVectors = kVectors > 3 ? kVectors / 2 : kVectors;  // in registers
  static constexpr int kStripKeys = kWidth < 8 ? 8 : kWidth;

  /// All of `count` keys: for the vectors that have rows, or for every vector.
  void see_all(const RowTile<kRows>& tile, int count, bool every_vector = false) {
    rows_ = tile.rows;
    vectors_ = every_vector ? kVectors : (rows_ + kWidth - 1) / kWidth;
    for (int v = 0; v < vectors_; ++v) keys_[v] = {0, count};
  }

  /// What the vectors with rows see by the band, cut at multiples of kStripKeys from first_key on.
  void see_by_band(const Problem<T>& p, const RowTile<kRows>& tile, int64_t first_key, int count) {
    rows_ = tile.rows;
    vectors_ = (rows_ + kWidth - 1) / kWidth;
    for (int v = 0; v < vectors_; ++v) {
      const int first_row = v * kWidth;
      const int last_row = first_row + kWidth < rows_ ? first_row + kWidth - 1 : rows_ - 1;
      const KeyRange seen =
          keys_of_any(p.band, tile.query[first_row], tile.query[last_row], p.keys);
      const int64_t begin =
          seen.begin > first_key ? (seen.begin - first_key) / kStripKeys * kStripKeys : 0;
      const int64_t end = seen.end > first_key
                              ? (seen.end - first_key + kStripKeys - 1) / kStripKeys * kStripKeys
                              : 0;
      keys_[v] = {begin, end < count ? end : count};
    }
  }

  /// f(first vector, their number as a Constant, keys): vectors that see the same keys together.
  template <class F>
  QKV_INLINE void for_each_part(F f) const {
    for (int v = 0, end; v < vectors_; v = end) {
      const int end_of_part = v / kPartVectors * kPartVectors + kPartVectors;
      end = v + 1;
      while (end < vectors_ && end < end_of_part && same(keys_[end], keys_[v])) ++end;
      if (keys_[v].empty()) continue;
      with_vectors(
          end - v, [&](auto vectors) __attribute__((always_inline)) { f(v, vectors, keys_[v]); });
    }
  }

  /// The same, but keys that the same vectors see together: products that add to nothing are cut
  /// into fewer pieces so.
  template <class F>
  QKV_INLINE void for_each_piece(int count, F f) const {
    for_each_strip_of_vectors(
        count, [&](KeyRange keys, int first, int end) __attribute__((always_inline)) {
          for (int v = first; v < end; v += kPartVectors) {
            with_vectors(
                end - v, [&](auto vectors) __attribute__((always_inline)) { f(v, vectors, keys); });
          }
        });
  }

  /// f(keys, first row, rows): keys of the block that the same vectors see together, and their
  /// rows.
  template <class F>
  QKV_INLINE void for_each_strip(int count, F f) const {
    for_each_strip_of_vectors(
        count, [&](KeyRange keys, int first, int end) __attribute__((always_inline)) {
          const int first_row = first * kWidth, end_row = end * kWidth;
          f(keys, first_row, (end_row < rows_ ? end_row : rows_) - first_row);
        });
  }

  /// f(first row, rows, keys): rows whose vectors see the same keys.
  template <class F>
  QKV_INLINE void for_each_rows(F f) const {
    for (int v = 0, end; v < vectors_; v = end) {
      end = v + 1;
      while (end < vectors_ && same(keys_[end], keys_[v])) ++end;
      const int first = v * kWidth, end_row = end * kWidth < rows_ ? end * kWidth : rows_;
      if (!keys_[v].empty()) f(first, end_row - first, keys_[v]);
    }
  }

 private:
  template <class F>
  QKV_INLINE void for_each_strip_of_vectors(int count, F f) const {
    for (int begin = 0, end; begin < count; begin = end) {
      const Vectors seeing = vectors_that_see(begin);
      end = begin + kStripKeys;
      while (end < count && vectors_that_see(end) == seeing) end += kStripKeys;
      if (seeing.first < seeing.end) {
        f(KeyRange{begin, end < count ? end : count}, seeing.first, seeing.end);
      }
    }
  }

  struct Vectors {
    int first, end;
    bool operator==(const Vectors& other) const { return first == other.first && end == other.end; }
  };

  template <class F>
  static QKV_INLINE void with_vectors(int count, F f) {
    if constexpr (kPartVectors > 2) {
      if (count > 2) return f(Constant<3>{});
    }
    if constexpr (kPartVectors > 1) {
      if (count > 1) return f(Constant<2>{});
    }
    f(Constant<1>{});
  }

  static bool same(KeyRange a, KeyRange b) { return a.begin == b.begin && a.end == b.end; }

  /// Those between the first and the last that see a key: rows see ranges that move with them.
  Vectors vectors_that_see(int64_t key) const {
    Vectors seeing{0, vectors_};
    const auto sees = [&](int v) { return keys_[v].begin <= key && key < keys_[v].end; };
    while (seeing.first < seeing.end && !sees(seeing.first)) ++seeing.first;
    while (seeing.first < seeing.end && !sees(seeing.end - 1)) --seeing.end;
    return seeing;
  }

  KeyRange keys_[kVectors];  // of the block
  int vectors_ = 0;
  int rows_ = 0;  // of the tile
};

}  // namespace qkv::kernels::QKV_ISA
