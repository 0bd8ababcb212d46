#pragma once

#include "kernels/cuda/simt/forward_result.cuh"
#include "kernels/cuda/simt/product.cuh"
#include "kernels/cuda/simt/score.cuh"
#include "kernels/cuda/simt/unit.cuh"
#include "kernels/online_softmax.h"

// Forward attention (FlashAttention-2, arXiv:2307.08691, algorithm 1).
//
//     out = dropout(softmax(softcap(scale · Q Kᵀ) + mask - ALiBi)) V
//     lse = log of the sum that the softmax divides by, a sink included
//
// A block owns 16 · kOwn packed rows of one key/value head, 16 · kColumns columns of the output and
// one range of the keys ("split"; there is one unless rows are few):
//
//     for 64 keys at a time:   S   [rows][64]      in registers
//                              Pᵀ  [64][rows]      to shared memory
//                              O   [rows][columns] in registers
//
// An output wider than that is computed by several blocks, each of which computes P.

namespace qkv::kernels::simt {

/// What a block of the forward kernel has in shared memory.
template <class T, int kOwn, int kColumns>
struct ForwardShared {
  SharedMemory memory;
  T* stages = memory.take<T>(kStageNumbers<T, kOwn, kColumns>);
  T* weights = memory.take<T>(kOthers * kOwnStep<kOwn>);  // [64][rows]
  uint32_t* kept = memory.take<uint32_t>(kThreads);       // of each thread
  RowTile rows = RowTile::in<kSide * kOwn>(memory);
  int64_t* query_offsets = memory.take<int64_t>(kSide * kOwn);

  explicit constexpr QKV_INLINE ForwardShared(char* begin) : memory(begin) {}
};

/// s: scale · <q, k> -> scores, -inf where the pair is not kept.
template <int kOwn, class T>
QKV_DEVICE PairBits modify_pairs(const Scores<T>& scores, const RowTile& tile, int64_t first_key,
                                 int rows, int keys, T (&s)[kOwn][kOthersOfThread]) {
  T pairs[kOwn * kOthersOfThread];
#pragma unroll
  for (int i = 0; i < kOwn * kOthersOfThread; ++i) pairs[i] = s[i / 4][i % 4];
  PairBits bits{0, 0};
  uint32_t stays = 0xf;
  for_each_pair<kOwn, false>([&](int row, int key, int pair) {
    const int r = thread_y() * kOwn + row, k = thread_x() * kOthersOfThread + key;
    if (scores.drops() && key == 0 && r < rows) stays = scores.stays(tile, r, first_key + k);
    T cap;
    const bool keep =
        r < rows && k < keys && scores.modify(tile, r, first_key + k, pairs[pair], cap);
    if (!keep) pairs[pair] = -infinity<T>();
    bits.kept |= static_cast<uint32_t>(keep) << pair;
    bits.stays |= (stays >> key & 1) << pair;
  });
#pragma unroll
  for (int i = 0; i < kOwn * kOthersOfThread; ++i) s[i / 4][i % 4] = pairs[i];
  return bits;
}

template <class Element, int kOwn, int kColumns>
QKV_DEVICE void forward_unit(const ForwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kRows = kSide * kOwn, kWidth = kSide * kColumns;
  const Problem<T>& p = task.forward.problem;
  const ForwardShared<T, kOwn, kColumns> shared(device::shared_memory());
  const int64_t columns = output_columns(task);
  const RowUnit<kRows, kWidth> u(p, unit, columns, task.splits);

  const RowTile& tile = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, p.scale, shared.query_offsets);
  tile.load<kRows>(p, u.packed, u.first_row, query.offsets);
  device::barrier();
  const Scores<T> scores(p, u.batch);
  const KeyRange split = keys_of_split(p.keys, task.splits, u.split);
  const KeyRange any = u.keys_of_any(p).intersection(split);

  // Of a group of tiles, and of all: maxima, sums of this thread's keys only, and outputs.
  using Softmax = OnlineSoftmax<ScalarMath<T>>;
  Softmax softmax[kOwn];
  T out[kOwn][kColumns];
  volatile T max_of_all[kOwn], sum_of_all[kOwn], out_of_all[kOwn][kColumns];
  set_to_zero(out);
  set_to_zero(out_of_all);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    softmax[i].clear();
    max_of_all[i] = softmax[i].max;
    sum_of_all[i] = softmax[i].sum;
  }

  const auto key = TileKeys<Element>::of_head(p, p.key, u.batch, u.kv_head);
  const auto value = TileKeys<Element>::of_head(p, p.value, u.batch, u.kv_head);
  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    T s[kOwn][kOthersOfThread];
    multiply_pairs<kOwn>(query, key.tile(n, keys), p.head_dim, shared.stages, s);
    PairBits bits{0xffffffff, 0xffffffff};
    if (partial || scores.changes() || scores.drops()) {
      bits = modify_pairs<kOwn>(scores, tile, n, u.rows, keys, s);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      T block_max = s[i][0];
#pragma unroll
      for (int j = 1; j < kOthersOfThread; ++j) block_max = maximum(block_max, s[i][j]);
      const T correction = softmax[i].raise_max(maximum_of_lanes<kSide>(block_max));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) out[i][j] *= correction;
      const T shift = softmax[i].shift();
#pragma unroll
      for (int j = 0; j < kOthersOfThread; ++j) s[i][j] = softmax[i].weight(s[i][j], shift);
      if (scores.drops()) {
#pragma unroll
        for (int j = 0; j < kOthersOfThread; ++j) {
          s[i][j] = bits.stays >> (4 * i + j) & 1 ? s[i][j] : T(0);
        }
      }
    }
    if (columns == 0) return;
    store_pairs(s, shared.weights);
    device::store_shared(shared.kept + device::thread(), bits.kept);
    multiply_columns(OwnTile<T>{shared.weights, shared.kept, partial}, value.tile(n, keys), keys,
                     u.first_column, p.value_dim, shared.stages, out);
  };
  const auto end = [&] {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Softmax all{max_of_all[i], sum_of_all[i]};
      const T correction = all.raise_max(softmax[i].max);
      max_of_all[i] = all.max;
      sum_of_all[i] = all.sum + softmax[i].sum;
      softmax[i].sum = T(0);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) out_of_all[i][j] = out_of_all[i][j] * correction;
    }
    end_group(out, out_of_all);
  };
  u.for_each_tile(p, any, scores.masks(), add_tile, end);

  const ForwardResult<Element> result(task, u.batch);
  const bool writes_scalars = u.chunk == 0 && thread_x() == 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    T max = max_of_all[i], sum = sum_of_lanes<kSide>(sum_of_all[i]);
    const int r = thread_y() * kOwn + i;
    if (!tile.exists(r)) continue;
    const int64_t head = device::load_shared(tile.head + r);
    const int64_t i_query = device::load_shared(tile.query + r);
    if (task.splits > 1) {
      T* row = partial_row(task, u.head, u.first_row + r) + u.split * partial_step(p);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int64_t column = u.first_column + column_of_thread(j);
        if (column < columns) device::store_global(row + column, out_of_all[i][j]);
      }
      if (writes_scalars) {
        device::store_global(row + p.value_dim, max);
        device::store_global(row + p.value_dim + 1, sum);
      }
      continue;
    }
    const bool has_keys = sum != T(0);
    const T normaliser = result.finish(head, max, sum);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = u.first_column + column_of_thread(j);
      if (column < columns) result.write(head, i_query, column, normaliser * out_of_all[i][j]);
    }
    if (writes_scalars) result.write_lse(head, i_query, max, sum, has_keys);
  }
}

template <class Element, int kOwn, int kColumns>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(kOwn* kOthersOfThread + kOwn * kColumns))
attention_forward_kernel(QKV_PARAMS ForwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    forward_unit<Element, kOwn, kColumns>(task, unit);
    device::barrier();
  }
}

}  // namespace qkv::kernels::simt
