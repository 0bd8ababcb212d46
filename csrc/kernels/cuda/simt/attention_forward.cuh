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
// A block owns 64 packed rows of one key/value head, 16 · kColumns columns of the output and one
// range of the keys ("split"; there is one unless rows are few):
//
//     for 64 keys at a time:   S   [rows][64]      in registers
//                              Pᵀ  [64][rows]      to shared memory
//                              O   [rows][columns] in registers
//
// An output wider than that is computed by several blocks, each of which computes P.

namespace qkv::kernels::simt {

/// What a block of the forward kernel has in shared memory. query_stages: those of Q, if it stays
/// there, else 0.
template <class T, int kOwn, int kColumns>
struct ForwardShared {
  SharedMemory memory;
  T* query;
  Stages<T> stages;
  T* weights = memory.take<T>(kOthers * kSideStep);              // [64][rows]
  uint32_t* kept = memory.take<uint32_t>(kThreadsOfTile<kOwn>);  // of each thread
  RowTile rows = RowTile::in<kOwns>(memory);
  int64_t* query_offsets = memory.take<int64_t>(kOwns);

  explicit constexpr QKV_INLINE ForwardShared(char* begin, int64_t query_stages = 0)
      : memory(begin),
        query(memory.take<T>(static_cast<int>(query_stages * kSideStage<T>))),
        stages(Stages<T>::in(memory, stage_numbers<T, kColumns>(query_stages != 0))) {}
};

/// s: -inf where the pair is not kept, if that is for the band and the ends of rows and keys alone.
/// Returns which are kept.
template <int kOwn, class T>
QKV_DEVICE uint32_t cut_pairs(const RowTile& tile, int64_t first_key, int keys,
                              T (&s)[kOwn][kOthersOfThread]) {
  const int of_thread = thread_x() * kOthersOfThread;
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int r = thread_y() * kOwn + i;
    const int begin = within(kOthers, device::load_shared(tile.begin + r) - first_key) - of_thread;
    const int end = within(keys, device::load_shared(tile.end + r) - first_key) - of_thread;
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) {
      const bool keep = j >= begin && j < end;
      s[i][j] = keep ? s[i][j] : -infinity<T>();
      kept |= static_cast<uint32_t>(keep) << (4 * i + j);
    }
  }
  return kept;
}

/// s: scale · <q, k> -> scores, -inf where the pair is not kept.
template <int kOwn, class T>
QKV_DEVICE PairBits modify_pairs(const Scores<T>& scores, const RowTile& tile, int64_t first_key,
                                 int rows, int keys, T (&s)[kOwn][kOthersOfThread]) {
  if (!scores.changes() && !scores.drops()) {
    return {cut_pairs(tile, first_key, keys, s), 0xffffffff};
  }
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

/// s: scores -> weights, 0 where dropout takes them, of which the softmax's sums know nothing. out
/// follows its maxima.
template <int kOwn, int kColumns, class T, class Softmax>
QKV_DEVICE void weigh_scores(bool drops, uint32_t stays, T (&s)[kOwn][kOthersOfThread],
                             Softmax (&softmax)[kOwn], T (&out)[kOwn][kColumns]) {
  // Of all rows at once: what a row waits for in a shuffle, others use.
  T max[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    max[i] = s[i][0];
#pragma unroll
    for (int j = 1; j < kOthersOfThread; ++j) max[i] = maximum(max[i], s[i][j]);
  }
#pragma unroll
  for (int bits = 1; bits < kSide; bits *= 2) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) max[i] = maximum(max[i], device::shuffle_xor(max[i], bits));
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const T correction = softmax[i].raise_max(max[i]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) out[i][j] *= correction;
    const T shift = softmax[i].shift();
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) s[i][j] = softmax[i].weight(s[i][j], shift);
  }
  if (!drops) return;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) {
      s[i][j] = stays >> (4 * i + j) & 1 ? s[i][j] : T(0);
    }
  }
}

template <class Element, int kOwn, int kColumns>
QKV_DEVICE void forward_unit(const ForwardTask<Real<Element>>& task, int64_t unit,
                             int64_t query_stages) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const Problem<T>& p = task.forward.problem;
  const ForwardShared<T, kOwn, kColumns> shared(device::shared_memory(), query_stages);
  const int64_t columns = output_columns(task);
  const RowUnit<kOwns, kWidth> u(p, unit, columns, task.splits);

  const RowTile& tile = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, p.scale, shared.query_offsets);
  tile.load<kOwns>(p, u.packed, u.first_row, query.offsets);
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
  const auto keys_from = [&](int64_t n) { return key.tile(n, at_most(kOthers, any.end - n)); };
  // The products' stages follow each other without a pause: S's last is multiplied while V's first
  // is fetched, and V's last while the first of the next tile's S is.
  Stages<T> stages = shared.stages;
  if (query_stages != 0) {
    store_side<kOwn>(query, p.head_dim, shared.query);
    device::barrier();
  }
  using Pairs = PairStage<kOwn, TileRows<Element>, TileKeys<Element>>;
  StagePieces<Element, Pairs::kPieces> pieces;
  // What pairs fetches next. All tiles of a head lie in pieces, or none does.
  TileKeys<Element> tile_keys = keys_from(any.empty() ? 0 : any.begin - any.begin % kOthers);
  Pairs pairs(query, tile_keys, p.head_dim, pieces, query_stages != 0 ? shared.query : nullptr);
  if (!any.empty()) {
    pairs.fetch(0);
    pairs.store(stages.now);
    device::barrier();
  }
  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    T s[kOwn][kOthersOfThread];
    const TileKeys<Element> tile_values = value.tile(n, keys);
    // Without columns one stage of zeros, in which the next tile's first is fetched all the same.
    ColumnStage<kOwn, kColumns, TileKeys<Element>> values(tile_values, columns == 0 ? 1 : keys,
                                                          u.first_column, columns, pieces);
    bool finite = true;
    multiply_staged_pairs(
        pairs, stages, s, [&] { values.fetch(0); },
        [&](T* stage) { finite = values.store(stage); });
    PairBits bits{0xffffffff, 0xffffffff};
    if (partial || scores.changes() || scores.drops()) {
      bits = modify_pairs<kOwn>(scores, tile, n, u.rows, keys, s);
    }
    weigh_scores(scores.drops(), bits.stays, s, softmax, out);
    store_pairs(s, shared.weights);
    device::store_shared(shared.kept + device::thread(), bits.kept);
    const OwnTile<T> weights{shared.weights, shared.kept, partial};
    const bool exact = weights.barrier_or_not_finite(finite);
    const bool more = n + kOthers < any.end;
    if (more) tile_keys = keys_from(n + kOthers);
    multiply_staged_columns(
        weights, values, exact, stages, out,
        [&] {
          if (more) pairs.fetch(0);
        },
        [&](T* stage) {
          if (more) pairs.store(stage);
        });
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
QKV_KERNEL(kThreadsOfTile<kOwn>, (blocks_at_once<Real<Element>, kOwn>(kOwn * (4 + kColumns))))
attention_forward_kernel(QKV_PARAMS ForwardTask<Real<Element>> task, QKV_PARAMS int64_t units,
                         QKV_PARAMS int64_t query_stages) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    forward_unit<Element, kOwn, kColumns>(task, unit, query_stages);
    device::barrier();
  }
}

}  // namespace qkv::kernels::simt
