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
//     scores   eight lanes a key, four keys at a time; q lies in shared memory
//                  lane   0 .. 7   8 .. 15   16 .. 23   24 .. 31
//                  key      n       n + 1      n + 2      n + 3
//     softmax  a lane a key
//     output   a lane a column (and the columns 32, 64, 96 after it), a key at a time
//
// In the end the maxima, sums and outputs of the eight warps are merged, in order.

namespace qkv::kernels::simt {

constexpr int kWarpKeys = device::kWarp;
constexpr int kLanesOfKey = 8, kKeysAtOnce = device::kWarp / kLanesOfKey;
constexpr int kWarpColumns = 4 * device::kWarp;

template <class T, int kRows>
struct FewRowsShared {
  SharedMemory memory;
  RowTile rows = RowTile::in<kRows>(memory);
  int64_t* query_offsets = memory.take<int64_t>(kRows);
  T* numbers = memory.take<T>(kWarps * kRows * (kWarpColumns + 2));  // [warps][kRows][max, sum, ..]
  T* query;                                                          // [kRows][D], scaled

  constexpr QKV_INLINE FewRowsShared(char* begin, int64_t head_dim)
      : memory(begin), query(memory.take<T>(static_cast<int>(kRows * head_dim))) {}
};

/// The products of 32 keys with all rows: score[r] is of key `lane`.
template <class Element, int kRows>
QKV_DEVICE void multiply_keys(const TileKeys<Element>& keys, const Real<Element>* query,
                              int64_t head_dim, Real<Element> (&score)[kRows]) {
  using T = Real<Element>;
  const int lane = device::thread() % device::kWarp;
  for (int n = 0; n < kWarpKeys; n += kKeysAtOnce) {
    T sum[kRows] = {};
#pragma unroll 4
    for (int64_t d = lane % kLanesOfKey; d < head_dim; d += kLanesOfKey) {
      const T k = keys(n + lane / kLanesOfKey, d);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r] += device::load_shared(query + r * head_dim + d) * k;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T of_key = sum_of_lanes<kLanesOfKey>(sum[r]);
      const T of_lane = device::shuffle(of_key, lane % kKeysAtOnce * kLanesOfKey);
      if (lane / kKeysAtOnce * kKeysAtOnce == n) score[r] = of_lane;
    }
  }
}

template <class Element, int kRows>
QKV_DEVICE void few_rows_unit(const ForwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  const Problem<T>& p = task.forward.problem;
  const FewRowsShared<T, kRows> shared(device::shared_memory(), p.head_dim);
  const RowUnit<kRows, kWarpColumns> u(p, unit, p.value_dim, task.splits);
  const int lane = device::thread() % device::kWarp, warp = device::thread() / device::kWarp;

  const RowTile& tile = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, p.scale, shared.query_offsets);
  tile.load<kRows>(p, u.packed, u.first_row, query.offsets);
  device::barrier();
  for (int64_t i = device::thread(); i < kRows * p.head_dim; i += kThreads) {
    device::store_shared(shared.query + i, query(static_cast<int>(i / p.head_dim), i % p.head_dim));
  }
  device::barrier();
  const Scores<T> scores(p, u.batch);
  const KeyRange any = u.keys_of_any(p).intersection(keys_of_split(p.keys, task.splits, u.split));

  OnlineSoftmax<ScalarMath<T>> softmax[kRows];  // sums of this lane's keys only
  T out[kRows][4];
  set_to_zero(out);
#pragma unroll
  for (int r = 0; r < kRows; ++r) softmax[r].clear();
  for (int64_t n = any.begin - any.begin % kWarpKeys + warp * kWarpKeys; n < any.end;
       n += kWarps * kWarpKeys) {
    const int keys = at_most(kWarpKeys, any.end - n);
    T weight[kRows];
    multiply_keys<Element>(TileKeys<Element>::of(p, p.key, u.batch, u.kv_head, n, keys),
                           shared.query, p.head_dim, weight);
    uint32_t kept[kRows], kept_by_any = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      T cap;
      const bool keep =
          r < u.rows && lane < keys && scores.modify(tile, r, n + lane, weight[r], cap);
      if (!keep) weight[r] = -infinity<T>();
      kept[r] = device::ballot(keep);
      kept_by_any |= kept[r];
      const T correction = softmax[r].raise_max(maximum_of_lanes<device::kWarp>(weight[r]));
#pragma unroll
      for (int c = 0; c < 4; ++c) out[r][c] *= correction;
      weight[r] = softmax[r].weight(weight[r], softmax[r].shift());
      if (scores.drops() && r < u.rows) {
        const uint32_t stays = scores.stays(tile, r, n + lane / 4 * 4);
        if ((stays >> lane % 4 & 1) == 0) weight[r] = T(0);
      }
    }
    const auto values = TileKeys<Element>::of(p, p.value, u.batch, u.kv_head, n, keys);
    for (int j = 0; j < keys; ++j) {
      if ((kept_by_any >> j & 1) == 0) continue;
      T v[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t column = u.first_column + c * device::kWarp + lane;
        v[c] = column < p.value_dim ? values(j, column) : T(0);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T w = device::shuffle(weight[r], j);
        if ((kept[r] >> j & 1) == 0) continue;  // or 0 · NaN would reach it
#pragma unroll
        for (int c = 0; c < 4; ++c) out[r][c] += w * v[c];
      }
    }
  }

  // [ max | sum | out ] of each warp's row.
  constexpr int kStep = kWarpColumns + 2;
  T* own = shared.numbers + warp * kRows * kStep;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T sum = sum_of_lanes<device::kWarp>(softmax[r].sum);
    if (lane == 0) {
      device::store_shared(own + r * kStep, softmax[r].max);
      device::store_shared(own + r * kStep + 1, sum);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      device::store_shared(own + r * kStep + 2 + c * device::kWarp + lane, out[r][c]);
    }
  }
  device::barrier();
  const ForwardResult<Element> result(task, u.batch);
  for (int i = device::thread(); i < u.rows * kWarpColumns; i += kThreads) {
    const int r = i / kWarpColumns;
    const int64_t column = u.first_column + i % kWarpColumns;
    const T* parts = shared.numbers + r * kStep;
    T max = -infinity<T>(), sum = T(0), sum_of_column = T(0);
    for (int w = 0; w < kWarps; ++w) {
      max = maximum(max, device::load_shared(parts + w * kRows * kStep));
    }
    for (int w = 0; w < kWarps; ++w) {
      const T* part = parts + w * kRows * kStep;
      const T factor = factor_of_part(device::load_shared(part), max);
      sum += factor * device::load_shared(part + 1);
      sum_of_column += factor * device::load_shared(part + 2 + i % kWarpColumns);
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
