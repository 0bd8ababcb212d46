#pragma once

#include "kernels/params.h"

// Causal masks, sliding windows, KV caches and chunks are all one band around the diagonal:
//
//        keys ->   0 1 2 3 4 5 6 7
//   query 0 (p=2)  # # # # . . . .      left = 2, right = 1, offset = 2
//   query 1 (p=3)  . # # # # . . .
//   query 2 (p=4)  . . # # # # . .
//
// QKV_ISA names the namespace this is compiled into, so that no two instruction sets share code.

namespace qkv::kernels::QKV_ISA {

/// Keys begin <= j < end.
struct KeyRange {
  int64_t begin;
  int64_t end;

  QKV_INLINE bool empty() const { return begin >= end; }
  QKV_INLINE bool contains(KeyRange other) const {
    return begin <= other.begin && other.end <= end;
  }
  QKV_INLINE KeyRange intersection(KeyRange other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
};

/// The keys that query i may see, among N.
QKV_INLINE KeyRange keys_of_query(const Band& band, int64_t i, int64_t keys) {
  const int64_t p = i + band.offset;
  KeyRange range{0, keys};
  if (band.left >= 0 && p - band.left > 0) range.begin = p - band.left;
  if (band.right >= 0 && p + band.right + 1 < keys) range.end = p + band.right + 1;
  return range;
}

/// Keys seen by at least one of the queries first <= i <= last. May be empty.
QKV_INLINE KeyRange keys_of_any(const Band& band, int64_t first, int64_t last, int64_t keys) {
  return {keys_of_query(band, first, keys).begin, keys_of_query(band, last, keys).end};
}

/// Keys seen by every one of the queries first <= i <= last. May be empty.
QKV_INLINE KeyRange keys_of_all(const Band& band, int64_t first, int64_t last, int64_t keys) {
  return {keys_of_query(band, last, keys).begin, keys_of_query(band, first, keys).end};
}

/// Blocks of keys begin at multiples of 8: masks and random numbers come in groups of 8 keys.
QKV_INLINE int64_t first_of_eight(int64_t key) { return key - key % 8; }

}  // namespace qkv::kernels::QKV_ISA
