#pragma once

#include "kernels/cuda/simt/product.cuh"
#include "kernels/cuda/simt/score.cuh"
#include "kernels/cuda/simt/tasks.h"

// Backward attention (FlashAttention-2, arXiv:2307.08691, algorithm 2) without atomics: each number
// of a gradient has one owner that sums its terms in order, at the price of P and dS computed
// twice.
//
//     delta = <dO, O> - dLSE                                       of each row, first
//     P = exp(S - lse)     dP = R ∘ (dO Vᵀ)     dS = P ∘ (dP - delta)     dU = softcap' ∘ dS
//
//     grad_query_kernel    owns rows    dQ = scale · dU K          and row sums for the slopes
//     grad_key_kernel      owns keys    dV = (R ∘ P)ᵀ dO, dK = dUᵀ (scale · Q)
//
// Gradients wider than 16 · kColumns are computed in chunks by several blocks.

namespace qkv::kernels::simt {

constexpr int kBackwardOwn = 4;
static_assert(kBackwardOwn == 4 && kOthersOfThread == 4, "a thread has 4 x 4 pairs");
constexpr int kBackwardRows = kSide * kBackwardOwn;

/// What the backward knows of a tile's rows, in shared memory.
template <class T>
struct BackwardRows {
  RowTile tile;
  T* lse;
  T* lse_rest;
  T* delta;
  int64_t* query_offsets;
  int64_t* grad_out_offsets;

  template <int kRows>
  static QKV_INLINE BackwardRows in(SharedMemory& shared) {
    BackwardRows rows;
    rows.tile = RowTile::in<kRows>(shared);
    rows.lse = shared.take<T>(kRows);
    rows.lse_rest = shared.take<T>(kRows);
    rows.delta = shared.take<T>(kRows);
    rows.query_offsets = shared.take<int64_t>(kRows);
    rows.grad_out_offsets = shared.take<int64_t>(kRows);
    return rows;
  }

  /// With barriers before and after.
  template <int kRows, class Query, class GradOut>
  QKV_DEVICE void load(const BackwardTask<T>& task, int64_t batch, const PackedRows& packed,
                       int64_t first, const Query& query, const GradOut& grad_out) const {
    const BackwardParams<T>& params = task.backward;
    device::barrier();
    tile.load<kRows>(params.problem, packed, first, query.offsets, grad_out.offsets);
    for (int r = device::thread(); r < kRows; r += kThreads) {
      // A row that keeps nothing, or only scores that overflowed, has lse = -inf: P = 0 with inf.
      T of_row = infinity<T>(), rest = T(0), delta_of_row = T(0);
      if (first + r < packed.count) {
        const int64_t scalar =
            (batch * params.problem.query_heads + packed.head(first + r)) * params.problem.queries +
            packed.query(first + r);
        const T x = device::load_global(params.lse + scalar);
        if (x != -infinity<T>()) of_row = x;
        rest = device::load_global(params.lse_rest + scalar);
        delta_of_row = device::load_global(task.delta + scalar);
      }
      device::store_shared(lse + r, of_row);
      device::store_shared(lse_rest + r, rest);
      device::store_shared(delta + r, delta_of_row);
    }
    device::barrier();
  }

  /// P of a score that is kept.
  QKV_DEVICE T probability(int r, T score) const {
    // Rounding can leave a score of 1e8 above its lse; without the clamp P would overflow.
    return natural_exp(
        minimum(T(0), score - device::load_shared(lse + r) - device::load_shared(lse_rest + r)));
  }
};

/// The pairs of a thread from products to gradients,
///
///     s: U -> R ∘ P       g: dO Vᵀ -> dU, or dS if kOfScores
///
/// both 0 where the pair is not kept. With kOwnsKeys keys are the tile's own side, else rows.
/// slope_sums[row] -= dS · |p - j|, unless nullptr. Returns which pairs are kept.
template <bool kOwnsKeys, bool kOfScores, class T>
QKV_DEVICE uint32_t through_softmax(const Scores<T>& scores, const BackwardRows<T>& table,
                                    int64_t first_key, int rows, int keys, bool partial,
                                    T drop_scale, T (&s)[kBackwardOwn][kOthersOfThread],
                                    T (&g)[kBackwardOwn][kOthersOfThread], T* slope_sums) {
  const int row_of_thread = (kOwnsKeys ? thread_x() : thread_y()) * 4;
  const int key_of_thread = (kOwnsKeys ? thread_y() : thread_x()) * 4;
  if (!partial && !scores.changes() && !scores.drops()) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = row_of_thread + (kOwnsKeys ? j : i);
        s[i][j] = table.probability(r, s[i][j]);
        g[i][j] = s[i][j] * (g[i][j] - device::load_shared(table.delta + r));
      }
    }
    return 0xffffffff;
  }
  T pairs[16], products[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    pairs[i] = s[i / 4][i % 4];
    products[i] = g[i / 4][i % 4];
  }
  uint32_t kept = 0, stays = 0xf;
  for_each_pair<4, kOwnsKeys>([&](int row, int key, int pair) {
    const int r = row_of_thread + row, k = key_of_thread + key;
    if (scores.drops() && key == 0 && r < rows) {
      stays = scores.stays(table.tile, r, first_key + key_of_thread);
    }
    T score = pairs[pair], cap_slope;
    T used = T(0), ds = T(0);
    if (r < rows && k < keys && scores.modify(table.tile, r, first_key + k, score, cap_slope)) {
      const T probability = table.probability(r, score);
      const bool stays_here = stays >> key & 1;
      const T dp = stays_here ? products[pair] * drop_scale : T(0);
      used = stays_here ? probability * drop_scale : T(0);
      ds = probability * (dp - device::load_shared(table.delta + r));
      if (slope_sums != nullptr) {
        slope_sums[row] -= ds * scores.distance(table.tile, r, first_key + k);
      }
      if (!kOfScores) ds *= cap_slope;
      kept |= 1u << pair;
    }
    pairs[pair] = used;
    products[pair] = ds;
  });
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    s[i / 4][i % 4] = pairs[i];
    g[i / 4][i % 4] = products[i];
  }
  return kept;
}

template <class T, int kColumns>
struct BackwardShared {
  T* stages;
  T* numbers;      // [64 others][own], P and then dU
  uint32_t* kept;  // of each thread
  BackwardRows<T> rows;
  SharedMemory memory;

  explicit QKV_INLINE BackwardShared(char* begin) : memory(begin) {
    stages = memory.take<T>(kStageNumbers<T, kBackwardOwn, kColumns>);
    numbers = memory.take<T>(kOthers * kOwnStep<kBackwardOwn>);
    kept = memory.take<uint32_t>(kThreads);
    rows = BackwardRows<T>::template in<kBackwardRows>(memory);
  }
};

/// delta of each row, a warp a row. An output of zeros is that of a row without keys, whose
/// incoming gradient may be NaN.
template <class Element>
QKV_KERNEL(kThreads, 1)
delta_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  const int lane = device::thread() % device::kWarp;
  for (int64_t unit = device::block() * kWarps + device::thread() / device::kWarp; unit < units;
       unit += device::blocks() * kWarps) {
    const int64_t i = unit % p.queries, head = unit / p.queries % p.query_heads;
    const int64_t batch = unit / p.queries / p.query_heads;
    const auto row = [&](const Operand<const T>& x) {
      return batch_of<Element>(p, x, batch) + head * x.head_stride + i * x.row_stride;
    };
    const Element* out_row = row(params.out);
    const Element* rest_row = sizeof(Element) == 2 ? row(task.out_rest) : nullptr;
    const Element* grad_row = row(params.grad_out);
    T sum = T(0);
    bool all_zero = true;
    for (int64_t column = lane; column < p.value_dim; column += device::kWarp) {
      T out = load_number(out_row + column);
      if constexpr (sizeof(Element) == 2) out += load_number(rest_row + column);
      sum += load_number(grad_row + column) * out;
      all_zero &= out == T(0);
    }
    sum = sum_of_lanes<device::kWarp>(sum);
    if (device::ballot(!all_zero) == 0) sum = T(0);
    if (params.grad_lse != nullptr) sum -= device::load_global(params.grad_lse + unit);
    if (lane == 0) device::store_global(task.delta + unit, sum);
  }
}

template <class Element, int kColumns>
QKV_DEVICE void grad_query_unit(const BackwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  const BackwardShared<T, kColumns> shared(device::shared_memory());
  const auto u = TileUnit::of(unit, column_chunks(p.head_dim, kWidth), 1,
                              ceil_divide(rows_of_kv_head(p), kBackwardRows));
  const int64_t batch = u.head / p.kv_heads, kv_head = u.head % p.kv_heads;
  const PackedRows packed = rows_of_kv_head(p, kv_head);
  const int64_t first_row = u.tile * kBackwardRows, first_column = u.chunk * kWidth;
  const int rows = at_most(kBackwardRows, packed.count - first_row);

  const BackwardRows<T>& table = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, batch, p.scale, table.query_offsets);
  const auto grad_out =
      TileRows<Element>::of(p, params.grad_out, batch, T(1), table.grad_out_offsets);
  table.template load<kBackwardRows>(task, batch, packed, first_row, query, grad_out);
  const Scores<T> scores(p, batch);
  const int64_t first_query = packed.query(first_row),
                last_query = packed.query(first_row + rows - 1);
  const KeyRange any = keys_of_any(p.band, first_query, last_query, p.keys);
  const KeyRange all = keys_of_all(p.band, first_query, last_query, p.keys);
  const T drop_scale = dropout_scale<T>(p.dropout);

  T* slope_gradient_of_rows = params.slope_gradient_of_rows;
  T grad[kBackwardOwn][kColumns], slope_gradient[kBackwardOwn] = {};
  set_to_zero(grad);
  for (int64_t n = any.begin - any.begin % kOthers; n < any.end; n += kOthers) {
    const int keys = at_most(kOthers, any.end - n);
    const bool partial =
        rows < kBackwardRows || keys < kOthers || scores.masks() || !all.contains({n, n + kOthers});
    T s[kBackwardOwn][kOthersOfThread], g[kBackwardOwn][kOthersOfThread];
    multiply_pairs<kBackwardOwn>(query, TileKeys<Element>::of(p, p.key, batch, kv_head, n, keys),
                                 p.head_dim, shared.stages, s);
    multiply_pairs<kBackwardOwn>(grad_out,
                                 TileKeys<Element>::of(p, p.value, batch, kv_head, n, keys),
                                 p.value_dim, shared.stages, g);
    const uint32_t kept =
        through_softmax<false, false>(scores, table, n, rows, keys, partial, drop_scale, s, g,
                                      slope_gradient_of_rows != nullptr ? slope_gradient : nullptr);
    store_pairs(g, shared.numbers);
    device::store_shared(shared.kept + device::thread(), kept);
    multiply_columns(OwnTile<T>{shared.numbers, shared.kept, partial},
                     TileKeys<Element>::of(p, p.key, batch, kv_head, n, keys), keys, first_column,
                     p.head_dim, shared.stages, grad);
  }

  Element* grad_query = batch_of<Element>(p, params.grad_query, batch);
#pragma unroll
  for (int i = 0; i < kBackwardOwn; ++i) {
    const int r = thread_y() * kBackwardOwn + i;
    slope_gradient[i] = sum_of_lanes<kSide>(slope_gradient[i]);
    if (r >= rows) continue;
    if (slope_gradient_of_rows != nullptr && u.chunk == 0 && thread_x() == 0) {
      device::store_global(slope_gradient_of_rows + table.tile.scalar(p, batch, r),
                           slope_gradient[i]);
    }
    if (params.grad_query.data == nullptr) continue;
    Element* row = table.tile.row(grad_query, params.grad_query, r);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = first_column + column_of_thread(j);
      if (column < p.head_dim) {
        store_number(row + column * params.grad_query.column_stride, p.scale * grad[i][j]);
      }
    }
  }
}

template <class Element, int kColumns>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(32 + 4 * kColumns))
grad_query_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_query_unit<Element, kColumns>(task, unit);
  }
}

/// Columns that the kernel for keys has to cover.
template <class T>
QKV_INLINE int64_t widest_gradient(const Problem<T>& p) {
  return p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
}

template <class Element, int kColumns>
QKV_DEVICE void grad_key_unit(const BackwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  const BackwardShared<T, kColumns> shared(device::shared_memory());
  const auto u = TileUnit::of(unit, column_chunks(widest_gradient(p), kWidth), 1,
                              ceil_divide(p.keys, kBackwardRows));
  const int64_t batch = u.head / p.kv_heads, kv_head = u.head % p.kv_heads;
  const PackedRows packed = rows_of_kv_head(p, kv_head);
  const int64_t first_key = u.tile * kBackwardRows, first_column = u.chunk * kWidth;
  const int keys = at_most(kBackwardRows, p.keys - first_key);
  const bool need_key = params.grad_key.data != nullptr && first_column < p.head_dim;
  const bool need_value = params.grad_value.data != nullptr && first_column < p.value_dim;

  const BackwardRows<T>& table = shared.rows;
  const Scores<T> scores(p, batch);
  const auto query = TileRows<Element>::of(p, p.query, batch, p.scale, table.query_offsets);
  const auto grad_out =
      TileRows<Element>::of(p, params.grad_out, batch, T(1), table.grad_out_offsets);
  const auto key = TileKeys<Element>::of(p, p.key, batch, kv_head, first_key, keys);
  const auto value = TileKeys<Element>::of(p, p.value, batch, kv_head, first_key, keys);
  const T drop_scale = dropout_scale<T>(p.dropout);

  T grad_key[kBackwardOwn][kColumns], grad_value[kBackwardOwn][kColumns];
  set_to_zero(grad_key);
  set_to_zero(grad_value);
  for (int64_t first_row = 0; first_row < packed.count; first_row += kOthers) {
    const int rows = at_most(kOthers, packed.count - first_row);
    const int64_t first_query = packed.query(first_row);
    const int64_t last_query = packed.query(first_row + rows - 1);
    const KeyRange own{first_key, first_key + keys};
    if (keys_of_any(p.band, first_query, last_query, p.keys).intersection(own).empty()) continue;
    const bool partial = rows < kOthers || keys < kBackwardRows || scores.masks() ||
                         !keys_of_all(p.band, first_query, last_query, p.keys).contains(own);
    table.template load<kOthers>(task, batch, packed, first_row, query, grad_out);

    T s[kBackwardOwn][kOthersOfThread], g[kBackwardOwn][kOthersOfThread];
    multiply_pairs<kBackwardOwn>(key, query, p.head_dim, shared.stages, s);
    multiply_pairs<kBackwardOwn>(value, grad_out, p.value_dim, shared.stages, g);
    const uint32_t kept = through_softmax<true, false>(
        scores, table, first_key, rows, keys, partial, drop_scale, s, g, static_cast<T*>(nullptr));
    device::store_shared(shared.kept + device::thread(), kept);
    const OwnTile<T> own_tile{shared.numbers, shared.kept, partial};
    if (need_value) {
      store_pairs(s, shared.numbers);
      multiply_columns(own_tile, grad_out, rows, first_column, p.value_dim, shared.stages,
                       grad_value);
    }
    if (need_key) {
      store_pairs(g, shared.numbers);
      multiply_columns(own_tile, query, rows, first_column, p.head_dim, shared.stages, grad_key);
    }
  }

  const auto write = [&](const Operand<T>& grad, int64_t columns,
                         const T(&numbers)[kBackwardOwn][kColumns]) {
    Element* rows = batch_of<Element>(p, grad, batch) + kv_head * grad.head_stride +
                    (first_key + thread_y() * kBackwardOwn) * grad.row_stride;
#pragma unroll
    for (int i = 0; i < kBackwardOwn; ++i) {
      if (thread_y() * kBackwardOwn + i >= keys) break;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int64_t column = first_column + column_of_thread(j);
        if (column < columns) {
          store_number(rows + i * grad.row_stride + column * grad.column_stride, numbers[i][j]);
        }
      }
    }
  };
  if (need_key) write(params.grad_key, p.head_dim, grad_key);
  if (need_value) write(params.grad_value, p.value_dim, grad_value);
}

template <class Element, int kColumns>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(32 + 8 * kColumns))
grad_key_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_key_unit<Element, kColumns>(task, unit);
  }
}

}  // namespace qkv::kernels::simt
