#pragma once

#include "kernels/cuda/simt/merge.cuh"
#include "kernels/cuda/simt/score.cuh"
#include "kernels/cuda/simt/unit.cuh"
#include "kernels/online_softmax.h"

// Forward attention with few rows (a step of decoding): K and V are read once, from memory straight
// into registers, and reading them is all that counts. A block owns kRows packed rows of one
// key/value head, 128 columns of the output and one range of the keys, of which each warp takes 32
// in turn:
//
//     scores   eight lanes a key, each with 16 bytes of it; q lies in shared memory
//                  lane   0 .. 7   8 .. 15   16 .. 23   24 .. 31
//                  key      n       n + 1      n + 2      n + 3      and n + 4 .. n + 15
//     softmax  a lane a key
//     output   a lane four columns, four keys at a time
//
// so that a lane asks for several pieces of memory before it waits for the first.
// In the end the maxima, sums and outputs of the eight warps are merged, in order.

namespace qkv::kernels::simt {

constexpr int kWarpKeys = device::kWarp;
constexpr int kLanesOfKey = 8, kKeysAtOnce = device::kWarp / kLanesOfKey;
constexpr int kLaneColumns = 4, kWarpColumns = kLaneColumns * device::kWarp;
constexpr int kInFlight = 4;  // pieces that a lane asks for at once

/// Numbers of a key that a lane takes at once.
template <class Element>
constexpr int kKeyPiece = 16 / static_cast<int>(sizeof(Element));

/// Numbers that a row of q takes in shared memory, 0 after the last.
template <class Element>
QKV_INLINE int64_t query_step(int64_t head_dim) {
  return ceil_divide(head_dim, kKeyPiece<Element>) * kKeyPiece<Element>;
}

template <class T, int kRows>
struct FewRowsShared {
  static constexpr int kStep = kWarpColumns + kPad;

  SharedMemory memory;
  RowTile rows = RowTile::in<kRows>(memory);
  int64_t* query_offsets = memory.take<int64_t>(kRows);
  T* numbers = memory.take<T>(kWarps * kRows * kStep);  // [warps][kRows][out .., max, sum]
  T* query;                                             // [kRows][query_step], scaled

  constexpr QKV_INLINE FewRowsShared(char* begin, int64_t query_step)
      : memory(begin), query(memory.take<T>(static_cast<int>(kRows * query_step))) {}
};

/// Columns `column` and those after it, of `columns`, of keys k, k + step, ..
template <bool kInPieces, class Element, int kCount>
QKV_DEVICE void fetch_keys(const TileKeys<Element>& keys, int k, int step, int64_t column,
                           int64_t columns, Piece<Element, kCount> (&to)[kInFlight]) {
#pragma unroll
  for (int n = 0; n < kInFlight; ++n) {
    to[n] = fetch_piece<kInPieces, kCount>(keys, k + n * step, column, columns);
  }
}
template <class Element, int kCount>
QKV_DEVICE void fetch_keys(const TileKeys<Element>& keys, int k, int step, int64_t column,
                           int64_t columns, bool in_pieces,
                           Piece<Element, kCount> (&to)[kInFlight]) {
  if (in_pieces) {
    fetch_keys<true>(keys, k, step, column, columns, to);
  } else {
    fetch_keys<false>(keys, k, step, column, columns, to);
  }
}

/// The products of 32 keys with all rows: score[r] is of key `lane`.
template <class Element, int kRows>
QKV_DEVICE void multiply_keys(const TileKeys<Element>& keys, const Real<Element>* query,
                              int64_t head_dim, Real<Element> (&score)[kRows]) {
  using T = Real<Element>;
  constexpr int kNumbers = kKeyPiece<Element>;
  const int lane = device::thread() % device::kWarp;
  const int64_t step = query_step<Element>(head_dim);
  const bool in_pieces = keys.template lies_in_pieces<kNumbers>(head_dim);
#pragma unroll 1
  for (int n = 0; n < kWarpKeys; n += kInFlight * kKeysAtOnce) {
    T sum[kInFlight][kRows];
    set_to_zero(sum);
#pragma unroll 1
    for (int64_t d = lane % kLanesOfKey * kNumbers; d < head_dim; d += kLanesOfKey * kNumbers) {
      Piece<Element, kNumbers> pieces[kInFlight];
      fetch_keys(keys, n + lane / kLanesOfKey, kKeysAtOnce, d, head_dim, in_pieces, pieces);
#pragma unroll
      for (int g = 0; g < kInFlight; ++g) {
        T k[kNumbers];
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) k[i] = pieces[g][i];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          T q[kNumbers];
          device::load_shared(query + r * step + d, q);
#pragma unroll
          for (int i = 0; i < kNumbers; ++i) sum[g][r] += q[i] * k[i];
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kInFlight; ++g) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T of_key = sum_of_lanes<kLanesOfKey>(sum[g][r]);
        const T of_lane = device::shuffle(of_key, lane % kKeysAtOnce * kLanesOfKey);
        if (lane / kKeysAtOnce == n / kKeysAtOnce + g) score[r] = of_lane;
      }
    }
  }
}

template <class Element, int kRows>
QKV_DEVICE void few_rows_unit(const ForwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  const Problem<T>& p = task.forward.problem;
  using Shared = FewRowsShared<T, kRows>;
  const int64_t step = query_step<Element>(p.head_dim);
  const Shared shared(device::shared_memory(), step);
  const RowUnit<kRows, kWarpColumns> u(p, unit, p.value_dim, task.splits);
  const int lane = device::thread() % device::kWarp, warp = device::thread() / device::kWarp;

  const RowTile& tile = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, p.scale, shared.query_offsets);
  tile.load<kRows>(p, u.packed, u.first_row, query.offsets);
  device::barrier();
  for (int64_t i = device::thread(); i < kRows * step; i += kThreads) {
    const int64_t d = i % step;
    device::store_shared(shared.query + i,
                         d < p.head_dim ? query(static_cast<int>(i / step), d) : T(0));
  }
  device::barrier();
  const Scores<T> scores(p, u.batch);
  const KeyRange any = u.keys_of_any(p).intersection(keys_of_split(p.keys, task.splits, u.split));
  const KeyRange all = u.packed.keys_of_all(p, u.first_row, u.rows);

  const auto key = TileKeys<Element>::of_head(p, p.key, u.batch, u.kv_head);
  const auto value = TileKeys<Element>::of_head(p, p.value, u.batch, u.kv_head);

  OnlineSoftmax<ScalarMath<T>> softmax[kRows];  // sums of this lane's keys only
  T out[kRows][kLaneColumns];
  set_to_zero(out);
#pragma unroll
  for (int r = 0; r < kRows; ++r) softmax[r].clear();
  for (int64_t n = any.begin - any.begin % kWarpKeys + warp * kWarpKeys; n < any.end;
       n += kWarps * kWarpKeys) {
    const int keys = at_most(kWarpKeys, any.end - n);
    T weight[kRows];
    multiply_keys<Element>(key.tile(n, keys), shared.query, p.head_dim, weight);
    const bool partial =
        u.rows < kRows || keys < kWarpKeys || scores.changes() || !all.contains({n, n + kWarpKeys});
    uint32_t kept[kRows], kept_by_any = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      T cap;
      const bool keep = !partial || (r < u.rows && lane < keys &&
                                     scores.modify(tile, r, n + lane, weight[r], cap));
      if (!keep) weight[r] = -infinity<T>();
      kept[r] = device::ballot(keep);
      kept_by_any |= kept[r];
      const T correction = softmax[r].raise_max(maximum_of_lanes<device::kWarp>(weight[r]));
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) out[r][c] *= correction;
      weight[r] = softmax[r].weight(weight[r], softmax[r].shift());
      if (scores.drops() && r < u.rows) {
        const uint32_t stays = scores.stays(tile, r, n + lane / 4 * 4);
        if ((stays >> lane % 4 & 1) == 0) weight[r] = T(0);
      }
    }
    const auto values = value.tile(n, keys);
    const bool in_pieces = values.template lies_in_pieces<kLaneColumns>(p.value_dim);
#pragma unroll 1
    for (int j = 0; j < keys; j += kInFlight) {
      if ((kept_by_any >> j & ((1 << kInFlight) - 1)) == 0) continue;
      Piece<Element, kLaneColumns> pieces[kInFlight];
      fetch_keys(values, j, 1, u.first_column + lane * kLaneColumns, p.value_dim, in_pieces,
                 pieces);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        T v[kLaneColumns];
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) v[c] = pieces[k][c];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const T w = device::shuffle(weight[r], j + k);
          if ((kept[r] >> (j + k) & 1) == 0) continue;  // or 0 · NaN would reach it
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) out[r][c] += w * v[c];
        }
      }
    }
  }

  // [ out .. | max | sum ] of each warp's row.
  constexpr int kMax = kWarpColumns, kSum = kWarpColumns + 1;
  T* own = shared.numbers + warp * kRows * Shared::kStep;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    T* of_row = own + r * Shared::kStep;
    const T sum = sum_of_lanes<device::kWarp>(softmax[r].sum);
    device::store_shared(of_row + lane * kLaneColumns, out[r]);
    if (lane == 0) {
      device::store_shared(of_row + kMax, softmax[r].max);
      device::store_shared(of_row + kSum, sum);
    }
  }
  device::barrier();
  const ForwardResult<Element> result(task, u.batch);
  for (int i = device::thread(); i < u.rows * kWarpColumns; i += kThreads) {
    const int r = i / kWarpColumns;
    const int64_t column = u.first_column + i % kWarpColumns;
    const T* parts = shared.numbers + r * Shared::kStep;
    T max = -infinity<T>(), sum = T(0), sum_of_column = T(0);
    for (int w = 0; w < kWarps; ++w) {
      max = maximum(max, device::load_shared(parts + w * kRows * Shared::kStep + kMax));
    }
    for (int w = 0; w < kWarps; ++w) {
      const T* part = parts + w * kRows * Shared::kStep;
      const T factor = factor_of_part(device::load_shared(part + kMax), max);
      sum += factor * device::load_shared(part + kSum);
      sum_of_column += factor * device::load_shared(part + i % kWarpColumns);
    }
    if (task.splits > 1) {
      T* row = partial_row(task, u.head, u.first_row + r) + u.split * partial_step(p);
      if (column < p.value_dim) device::store_global(row + column, sum_of_column);
      if (column == 0) {
        device::store_global(row + p.value_dim, max);
        device::store_global(row + p.value_dim + 1, sum);
      }
      continue;
    }
    const int64_t head = device::load_shared(tile.head + r);
    const int64_t i_query = device::load_shared(tile.query + r);
    const bool has_keys = sum != T(0);
    const T normaliser = result.finish(head, max, sum);
    if (column < p.value_dim) result.write(head, i_query, column, normaliser * sum_of_column);
    if (column == 0) result.write_lse(head, i_query, max, sum, has_keys);
  }
}

template <class Element, int kRows>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(8 * kRows))
few_rows_kernel(QKV_PARAMS ForwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    few_rows_unit<Element, kRows>(task, unit);
    device::barrier();
  }
}

}  // namespace qkv::kernels::simt
