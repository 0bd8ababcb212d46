#pragma once

#include "kernels/cuda/simt/product.cuh"
#include "kernels/cuda/simt/score.cuh"
#include "kernels/cuda/simt/unit.cuh"

// The weights P = exp(S - lse), computed once more from the lse that the forward has left: what all
// derivatives begin with.

namespace qkv::kernels::simt {

/// A packed row's number in x, (B, Hq, M); `none` after the last row.
template <class T>
QKV_DEVICE T scalar_of_row(const Problem<T>& p, const T* x, int64_t batch, const PackedRows& packed,
                           int64_t row, T none) {
  if (row >= packed.count) return none;
  const int64_t head = batch * p.query_heads + packed.head(row);
  return device::load_global(x + head * p.queries + packed.query(row));
}

/// The lse from which a packed row's weights are computed. A row that keeps nothing, or only scores
/// that overflowed, has lse = -inf: P = 0 with inf.
template <class T>
QKV_DEVICE T lse_of_row(const Problem<T>& p, const T* lse_of_rows, int64_t batch,
                        const PackedRows& packed, int64_t row) {
  const T x = scalar_of_row(p, lse_of_rows, batch, packed, row, infinity<T>());
  return x == -infinity<T>() ? infinity<T>() : x;
}

/// The rows of a tile and their lse, in shared memory.
template <class T>
struct WeightRows {
  RowTile tile;
  T* lse;
  T* lse_rest;

  template <int kRows>
  static constexpr QKV_INLINE WeightRows in(SharedMemory& shared) {
    return {RowTile::in<kRows>(shared), shared.take<T>(kRows), shared.take<T>(kRows)};
  }

  /// From lse and its rest, (B, Hq, M), and what each of `operands`, TileRows, needs of the tile.
  /// Barriers must come before and after.
  template <int kRows, class... Operands>
  QKV_DEVICE void load(const Problem<T>& p, const T* lse_of_rows, const T* rest_of_rows,
                       int64_t batch, const PackedRows& packed, int64_t first,
                       const Operands&... operands) const {
    tile.load<kRows>(p, packed, first, operands.offsets...);
    if (const int r = device::thread(); r < kRows) {
      device::store_shared(lse + r, lse_of_row(p, lse_of_rows, batch, packed, first + r));
      device::store_shared(lse_rest + r,
                           scalar_of_row(p, rest_of_rows, batch, packed, first + r, T(0)));
    }
  }

  /// P of a score that is kept.
  QKV_DEVICE T probability(int r, T score) const {
    // Rounding can leave a score of 1e8 above its lse; without the clamp P would overflow.
    return natural_exp(
        minimum(T(0), score - device::load_shared(lse + r) - device::load_shared(lse_rest + r)));
  }
};

/// What a block has in shared memory. Rows are WeightRows and more.
template <class T, int kColumns, class Rows>
struct WeightShared {
  SharedMemory memory;
  Stages<T> stages = Stages<T>::in(memory, stage_numbers<T, kColumns>(false));
  T* numbers = memory.take<T>(kOthers * kSideStep);  // [64 others][own]: P, dU, ..
  uint32_t* kept = memory.take<uint32_t>(kThreads);  // of each thread, kThreads at most
  Rows rows = Rows::template in<kOwns>(memory);

  explicit constexpr QKV_INLINE WeightShared(char* begin) : memory(begin) {}
};

/// One of a thread's pairs, which is kept.
template <class T>
struct KeptPair {
  int number;  // of the thread's pairs
  int row;     // of the thread's rows
  int r;       // the same in the tile
  int64_t key;
  T score;
  T cap;       // see Scores::modify
  bool stays;  // dropout leaves its weight
};

/// f(KeptPair) for all that are kept, with their scores, of a thread's pairs U. With kOwnsKeys keys
/// are the tile's own side, else rows. Returns which these are, as OwnTile has them.
template <bool kOwnsKeys, class T, int kPairs, class F>
QKV_DEVICE uint32_t for_each_kept_pair(const Scores<T>& scores, const RowTile& tile,
                                       int64_t first_key, int rows, int keys,
                                       const T (&products)[kPairs], F f) {
  constexpr int kOwn = kPairs / kOthersOfThread;
  const int own = thread_y() * kOwn, other = thread_x() * kOthersOfThread;
  const int row_of_thread = kOwnsKeys ? other : own, key_of_thread = kOwnsKeys ? own : other;
  uint32_t kept = 0, stays = 0xf;
  for_each_pair<kOwn, kOwnsKeys>([&](int row, int key, int number) {
    const int r = row_of_thread + row, k = key_of_thread + key;
    if (scores.drops() && key % 4 == 0 && r < rows) stays = scores.stays(tile, r, first_key + k);
    KeptPair<T> pair{
        number, row, r, first_key + k, products[number], T(0), (stays >> key % 4 & 1) != 0};
    if (r >= rows || k >= keys || !scores.modify(tile, r, pair.key, pair.score, pair.cap)) return;
    f(pair);
    kept |= 1u << number;
  });
  return kept;
}

/// A thread's pairs as an array that loops index, and back: 0 for those that are not kept.
template <class T, int kOwn>
QKV_DEVICE void copy_pairs(const T (&from)[kOwn][kOthersOfThread],
                           T (&to)[kOwn * kOthersOfThread]) {
#pragma unroll
  for (int i = 0; i < kOwn * kOthersOfThread; ++i) to[i] = from[i / 4][i % 4];
}
template <class T, int kOwn>
QKV_DEVICE void copy_kept_pairs(uint32_t kept, const T (&from)[kOwn * kOthersOfThread],
                                T (&to)[kOwn][kOthersOfThread]) {
#pragma unroll
  for (int i = 0; i < kOwn * kOthersOfThread; ++i)
    to[i / 4][i % 4] = kept >> i & 1 ? from[i] : T(0);
}

}  // namespace qkv::kernels::simt
