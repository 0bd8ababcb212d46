#pragma once

#include "kernels/cuda/simt/product.cuh"
#include "kernels/cuda/simt/score.cuh"
#include "kernels/cuda/simt/tasks.h"
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

template <class T>
struct ScalarMath {
  using Number = T;
  static QKV_DEVICE T zero() { return T(0); }
  static QKV_DEVICE T one() { return T(1); }
  static QKV_DEVICE T slack() { return T(0); }
  static QKV_DEVICE T minus_infinity() { return -infinity<T>(); }
  static QKV_DEVICE T maximum(T a, T b) { return simt::maximum(a, b); }
  static QKV_DEVICE T exp(T x) { return natural_exp(x); }
  static QKV_DEVICE bool is_minus_infinity(T x) { return x == -infinity<T>(); }
  static QKV_DEVICE bool is_zero(T x) { return x == T(0); }
  static QKV_DEVICE T select(bool m, T a, T b) { return m ? a : b; }
};

/// The maximum, or sum, of the 16 threads that share rows.
template <class T>
QKV_DEVICE T maximum_of_row(T x) {
  for (int bits = 1; bits < kSide; bits *= 2) x = maximum(x, device::shuffle_xor(x, bits));
  return x;
}
template <class T>
QKV_DEVICE T sum_of_row(T x) {
  for (int bits = 1; bits < kSide; bits *= 2) x += device::shuffle_xor(x, bits);
  return x;
}

/// What a block of the forward kernel has in shared memory.
template <class T, int kOwn, int kColumns>
struct ForwardShared {
  T* stages;
  T* weights;      // [64][rows]
  uint32_t* kept;  // of each thread
  RowTile rows;
  int64_t* query_offsets;
  SharedMemory memory;

  explicit QKV_INLINE ForwardShared(char* begin) : memory(begin) {
    stages = memory.take<T>(kStageNumbers<T, kOwn, kColumns>);
    weights = memory.take<T>(kOthers * kOwnStep<kOwn>);
    kept = memory.take<uint32_t>(kThreads);
    rows = RowTile::in<kSide * kOwn>(memory);
    query_offsets = memory.take<int64_t>(kSide * kOwn);
  }
};

/// The unit's place in a (head, column chunk, split, tile) grid. Tiles come last first: under a
/// causal mask the last are the longest.
struct ForwardUnit {
  int64_t head;
  int64_t chunk;
  int64_t split;
  int64_t tile;

  static QKV_INLINE ForwardUnit of(int64_t unit, int64_t chunks, int64_t splits, int64_t tiles) {
    ForwardUnit u;
    u.tile = tiles - 1 - unit % tiles;
    unit /= tiles;
    u.split = unit % splits;
    unit /= splits;
    u.chunk = unit % chunks;
    u.head = unit / chunks;
    return u;
  }
};

/// Splits are cut at multiples of 64 keys, as evenly as that allows.
QKV_INLINE KeyRange keys_of_split(int64_t keys, int64_t splits, int64_t split) {
  const int64_t blocks = (keys + kOthers - 1) / kOthers;
  const int64_t begin = blocks * split / splits * kOthers;
  const int64_t end = blocks * (split + 1) / splits * kOthers;
  return {begin, end < keys ? end : keys};
}

/// The row of a partial result: [ out (Dv), not normalised | max | sum ].
template <class T>
QKV_INLINE int64_t partial_row(const Problem<T>& problem) {
  return problem.value_dim + 2;
}

/// A batch element of out and, of 16-bit types, what rounding takes from it.
template <class Element>
struct OutputRows {
  const ForwardTask<Real<Element>>& task;
  Element* out;
  Element* rest;

  QKV_DEVICE OutputRows(const ForwardTask<Real<Element>>& forward_task, int64_t batch)
      : task(forward_task),
        out(batch_of<Element>(task.forward.problem, task.forward.out, batch)),
        rest(sizeof(Element) == 2 ? batch_of<Element>(task.forward.problem, task.out_rest, batch)
                                  : nullptr) {}

  /// The row of a query and a head, at which columns can be written.
  QKV_DEVICE OutputRows row(int64_t head, int64_t query) const {
    OutputRows r = *this;
    r.out += head * task.forward.out.head_stride + query * task.forward.out.row_stride;
    if constexpr (sizeof(Element) == 2) {
      r.rest += head * task.out_rest.head_stride + query * task.out_rest.row_stride;
    }
    return r;
  }

  QKV_DEVICE void write(int64_t column, Real<Element> x) const {
    store_number(out + column * task.forward.out.column_stride, x);
    if constexpr (sizeof(Element) == 2) {
      const Element nearest = rounded(x, static_cast<const Element*>(nullptr));
      store_number(rest + column * task.out_rest.column_stride,
                   x - static_cast<Real<Element>>(nearest));
    }
  }
};

/// What the sums of some keys under their own maximum are multiplied with when they are added to
/// others. With nothing but NaN among their scores that maximum is -inf.
template <class T>
QKV_DEVICE T factor_of_part(T max_of_part, T max) {
  if (max_of_part == -infinity<T>()) return max == -infinity<T>() ? T(1) : T(0);
  return natural_exp(max_of_part - max);
}

template <class T>
QKV_DEVICE T sink_of(const Problem<T>& p, int64_t batch, int64_t head) {
  return device::load_global(p.sinks.data + batch_offset(p, batch, p.sinks.batch_stride) +
                             head * p.sinks.head_stride);
}

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
    T cap_slope;
    const bool keep =
        r < rows && k < keys && scores.modify(tile, r, first_key + k, pairs[pair], cap_slope);
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
  constexpr int kRows = kSide * kOwn, kWidth = kSide * kColumns, kStep = kOwnStep<kOwn>;
  const ForwardParams<T>& params = task.forward;
  const Problem<T>& p = params.problem;
  const ForwardShared<T, kOwn, kColumns> shared(device::shared_memory());
  const int64_t chunks = p.value_dim <= kWidth ? 1 : (p.value_dim + kWidth - 1) / kWidth;
  const int64_t rows_of_head = p.query_heads / p.kv_heads * p.queries;
  const auto u = ForwardUnit::of(unit, chunks, task.splits, (rows_of_head + kRows - 1) / kRows);
  const int64_t batch = u.head / p.kv_heads, kv_head = u.head % p.kv_heads;
  const PackedRows packed = rows_of_kv_head(p, kv_head);
  const int64_t first_row = u.tile * kRows;
  const int rows =
      packed.count - first_row < kRows ? static_cast<int>(packed.count - first_row) : kRows;
  const int64_t first_column = u.chunk * kWidth;

  const RowTile& tile = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, batch, p.scale, shared.query_offsets);
  tile.load<kRows>(p, packed, first_row, query.offsets);
  device::barrier();
  const Scores<T> scores(p, batch);
  const int64_t first_query = packed.query(first_row),
                last_query = packed.query(first_row + rows - 1);
  const KeyRange split = keys_of_split(p.keys, task.splits, u.split);
  const KeyRange any = keys_of_any(p.band, first_query, last_query, p.keys).intersection(split);
  const KeyRange all = keys_of_all(p.band, first_query, last_query, p.keys);

  OnlineSoftmax<ScalarMath<T>> softmax[kOwn];  // sums of this thread's keys only
  T out[kOwn][kColumns];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    softmax[i].clear();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) out[i][j] = T(0);
  }

  for (int64_t n = any.begin - any.begin % kOthers; n < any.end; n += kOthers) {
    const int keys = any.end - n < kOthers ? static_cast<int>(any.end - n) : kOthers;
    const bool partial =
        rows < kRows || keys < kOthers || scores.masks() || !all.contains({n, n + kOthers});
    T s[kOwn][kOthersOfThread];
    multiply_pairs<kOwn>(query, TileKeys<Element>::of(p, p.key, batch, kv_head, n, keys),
                         p.head_dim, shared.stages, s);
    PairBits bits{0xffffffff, 0xffffffff};
    if (partial || scores.changes() || scores.drops()) {
      bits = modify_pairs<kOwn>(scores, tile, n, rows, keys, s);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      T block_max = s[i][0];
#pragma unroll
      for (int j = 1; j < kOthersOfThread; ++j) block_max = maximum(block_max, s[i][j]);
      const T correction = softmax[i].raise_max(maximum_of_row(block_max));
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
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) {
      T column[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) column[i] = s[i][j];
      device::store_shared<kOwn>(
          shared.weights + (thread_x() * kOthersOfThread + j) * kStep + thread_y() * kOwn, column);
    }
    device::store_shared(shared.kept + device::thread(), bits.kept);
    multiply_columns(OwnTile<T>{shared.weights, shared.kept, partial},
                     TileKeys<Element>::of(p, p.value, batch, kv_head, n, keys), keys, first_column,
                     p.value_dim, shared.stages, out);
  }

  const T dropout = dropout_scale<T>(p.dropout);
  const OutputRows<Element> output(task, batch);
  const int64_t sinks = p.sinks.data == nullptr ? 0 : batch_offset(p, batch, p.sinks.batch_stride);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    softmax[i].sum = sum_of_row(softmax[i].sum);
    const int r = thread_y() * kOwn + i;
    if (!tile.exists(r)) continue;
    const int64_t head = device::load_shared(tile.head + r);
    const bool writes_scalars = u.chunk == 0 && thread_x() == 0;
    if (task.splits > 1) {
      T* row = params.partial +
               ((u.head * task.splits + u.split) * packed.count + first_row + r) * partial_row(p);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int64_t column = first_column + column_of_thread(j);
        if (column < p.value_dim) device::store_global(row + column, out[i][j]);
      }
      if (writes_scalars) {
        device::store_global(row + p.value_dim, softmax[i].max);
        device::store_global(row + p.value_dim + 1, softmax[i].sum);
      }
      continue;
    }
    T normaliser = softmax[i].normaliser();
    if (p.sinks.data != nullptr) {
      const T sink = device::load_global(p.sinks.data + sinks + head * p.sinks.head_stride);
      normaliser = add_sink(sink, softmax[i].max, softmax[i].sum);
    }
    normaliser *= dropout;
    const auto row = output.row(head, device::load_shared(tile.query + r));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = first_column + column_of_thread(j);
      if (column < p.value_dim) {
        row.write(column, normaliser * out[i][j]);
      }
    }
    if (writes_scalars) {
      T lse, rest;
      log_of_sum(softmax[i].max, softmax[i].sum, lse, rest);
      const int64_t scalar = tile.scalar(p, batch, r);
      device::store_global(params.lse + scalar, lse);
      device::store_global(params.lse_rest + scalar, rest);
    }
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

/// Output and logsumexp from the partial results of all splits, added in order. A warp for each
/// row.
template <class Element>
QKV_KERNEL(kThreads, 1)
merge_forward_kernel(QKV_PARAMS ForwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const ForwardParams<T>& params = task.forward;
  const Problem<T>& p = params.problem;
  const int lane = device::thread() % device::kWarp;
  constexpr int kWarps = kThreads / device::kWarp;
  for (int64_t unit = device::block() * kWarps + device::thread() / device::kWarp; unit < units;
       unit += device::blocks() * kWarps) {
    const int64_t rows_of_head = p.query_heads / p.kv_heads * p.queries;
    const int64_t kv = unit / rows_of_head, row = unit % rows_of_head;
    const int64_t batch = kv / p.kv_heads;
    const PackedRows packed = rows_of_kv_head(p, kv % p.kv_heads);
    const int64_t head = packed.head(row), query = packed.query(row);
    const T* parts = params.partial + (kv * task.splits * rows_of_head + row) * partial_row(p);
    const int64_t step = rows_of_head * partial_row(p);

    T max = -infinity<T>(), sum = T(0);
    for (int64_t s = 0; s < task.splits; ++s) {
      max = maximum(max, device::load_global(parts + s * step + p.value_dim));
    }
    const auto factor = [&](int64_t s) {
      return factor_of_part(device::load_global(parts + s * step + p.value_dim), max);
    };
    for (int64_t s = 0; s < task.splits; ++s) {
      const T of_split = device::load_global(parts + s * step + p.value_dim + 1);
      if (of_split != T(0)) sum += factor(s) * of_split;
    }
    T normaliser = sum == T(0) ? T(0) : T(1) / sum;
    T lse_max = max, lse_sum = sum;
    if (p.sinks.data != nullptr) {
      normaliser = add_sink(sink_of<T>(p, batch, head), lse_max, lse_sum);
    }
    normaliser *= dropout_scale<T>(p.dropout);
    const auto output = OutputRows<Element>(task, batch).row(head, query);
    for (int64_t column = lane; column < p.value_dim; column += device::kWarp) {
      T out = T(0);
      for (int64_t s = 0; s < task.splits; ++s) {
        if (device::load_global(parts + s * step + p.value_dim + 1) == T(0)) continue;
        out += factor(s) * device::load_global(parts + s * step + column);
      }
      output.write(column, normaliser * out);
    }
    if (lane == 0) {
      T lse, rest;
      log_of_sum(lse_max, lse_sum, lse, rest);
      const int64_t scalar = (batch * p.query_heads + head) * p.queries + query;
      device::store_global(params.lse + scalar, lse);
      device::store_global(params.lse_rest + scalar, rest);
    }
  }
}

}  // namespace qkv::kernels::simt
