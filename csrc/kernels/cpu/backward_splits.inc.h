#pragma once

#include "kernels/band.h"

// How a backward cuts the keys of a head: into blocks, which are multiplied at a time, "splits" of
// whole blocks, and units of work, which have one split or several. Blocks and splits are functions
// of sizes and of the band alone: the bits of gradients depend on them.
//
//     512 keys                                        under a causal mask
//     blocks  |  0  |  1  |  2  |  3  |  4  |  5  |    |  0  |  1  |  2  |  3  |  4  |  5  |
//     splits  |  0  |  1  |  2  |  3  |  4  |  5  |    |     0     |     1     |     2     |
//     units   |        0        |        1        |    |           0           |     1     |

namespace qkv::kernels::QKV_ISA {

constexpr int kBackwardBlockKeys = 96;
constexpr int64_t kMostSplits = 8;

template <class T>
inline int64_t backward_blocks(const Problem<T>& problem) {
  return (problem.keys + kBackwardBlockKeys - 1) / kBackwardBlockKeys;
}

inline int64_t possible_splits(int64_t wanted) {
  return wanted < 1 ? 1 : wanted < kMostSplits ? wanted : kMostSplits;
}

inline int64_t sixteens(int64_t keys) { return (keys + 15) / 16; }

/// Up to 8 blocks are as long as each other, to within 16 keys: so are splits, then. Under a causal
/// mask or a window they are not: of whole blocks and whole tiles of rows, fewer meet at its edge.
template <class T>
inline bool has_even_blocks(const Problem<T>& problem) {
  return problem.band.left < 0 && problem.band.right < 0 && backward_blocks(problem) <= kMostSplits;
}

/// Where block `block` of a head begins.
template <class T>
inline int64_t begin_of_block(const Problem<T>& problem, int64_t block) {
  if (block == 0 || !has_even_blocks(problem)) return block * kBackwardBlockKeys;
  return sixteens(problem.keys) * block / backward_blocks(problem) * 16;
}

/// The block that begins with `key`, if one does.
template <class T>
inline int64_t block_of_key(const Problem<T>& problem, int64_t key) {
  if (!has_even_blocks(problem)) return key / kBackwardBlockKeys;
  const int64_t all = sixteens(problem.keys);
  return (sixteens(key) * backward_blocks(problem) + all - 1) / all;
}

/// A split is one even block. Else it is two, or more: where the band's edge cuts a block, its part
/// of dQ is summed by itself, and that costs more than with the block before it.
template <class T>
inline int64_t backward_splits(const Problem<T>& problem) {
  const int64_t blocks = backward_blocks(problem);
  return possible_splits(has_even_blocks(problem) ? blocks : (blocks + 1) / 2);
}

/// Of kernels that pack all rows for each split, or have few of them: splits are long.
template <class T>
inline int64_t long_splits(const Problem<T>& problem) {
  return possible_splits(problem.keys / 512);
}

/// Splits are cut as evenly as whole blocks allow.
template <class T>
inline KeyRange keys_of_split(const BackwardParams<T>& params, int64_t split) {
  const int64_t blocks = backward_blocks(params.problem);
  const int64_t begin = begin_of_block(params.problem, blocks * split / params.splits);
  const int64_t end = begin_of_block(params.problem, blocks * (split + 1) / params.splits);
  return {begin, end < params.problem.keys ? end : params.problem.keys};
}

/// How many keys a block takes from n on: up to where those begin or end that all rows of a tile
/// see, if these are worth a block of their own, as whole blocks take less work for each pair.
inline int keys_of_block(int64_t n, int64_t end, KeyRange of_all) {
  constexpr int64_t kLeast = kBackwardBlockKeys / 3;
  if (n + kBackwardBlockKeys < end) end = n + kBackwardBlockKeys;
  const int64_t end_of_all = of_all.end < end ? first_of_eight(of_all.end) : end;
  const auto whole = KeyRange{n, end}.intersection({first_of_eight(of_all.begin + 7), end_of_all});
  if (whole.end - whole.begin < kLeast) return static_cast<int>(end - n);
  return static_cast<int>((whole.begin > n ? whole.begin : whole.end) - n);
}

/// f(first key, keys) for the blocks of `range`, those keys of a split that a tile's rows see.
template <class F>
QKV_INLINE void for_each_block(KeyRange range, KeyRange of_all, F f) {
  int block;
  for (int64_t n = first_of_eight(range.begin); n < range.end; n += block) {
    block = keys_of_block(n, range.end, of_all);
    f(n, block);
  }
}

/// Splits of a unit, counted within its head.
struct SplitRange {
  int64_t begin, end;
};
template <class T>
inline SplitRange splits_of_unit(const BackwardParams<T>& params, int64_t unit) {
  const auto begin = [&](int64_t u) {
    return (params.splits * u + params.units - 1) / params.units;
  };
  return {begin(unit), begin(unit + 1)};
}
template <class T>
inline KeyRange keys_of_splits(const BackwardParams<T>& params, SplitRange splits) {
  return {keys_of_split(params, splits.begin).begin, keys_of_split(params, splits.end - 1).end};
}

/// A unit of several splits loads the rows of a tile once for all of them and leaves one part of
/// dQ. But what it reads and writes of more than 512 keys should not lie far behind a second-level
/// cache.
template <class T>
inline int64_t least_units(const BackwardParams<T>& params) {
  constexpr int64_t kBytes = int64_t{1} << 20, kKeys = 512;  // of K and V
  const Problem<T>& p = params.problem;
  const int64_t row = (p.head_dim + p.value_dim) * static_cast<int64_t>(sizeof(T));
  int64_t units = 1;
  while (units < params.splits && p.keys > kKeys * units && p.keys * row > kBytes * units) {
    units *= 2;
  }
  return units < params.splits ? units : params.splits;
}

/// Of kernels whose units are splits.
template <class T>
inline int64_t units_of_one_split(const BackwardParams<T>& params) {
  return params.splits;
}

}  // namespace qkv::kernels::QKV_ISA
