#pragma once

#include "kernels/cuda/simt/tasks.h"
#include "kernels/cuda/simt/weights.cuh"
#include "kernels/logsumexp.h"

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

/// What the backward knows of a tile's rows, in shared memory.
template <class T>
struct BackwardRows : WeightRows<T> {
  T* delta;
  int64_t* query_offsets;
  int64_t* grad_out_offsets;

  template <int kRows>
  static constexpr QKV_INLINE BackwardRows in(SharedMemory& shared) {
    return {WeightRows<T>::template in<kRows>(shared), shared.take<T>(kRows),
            shared.take<int64_t>(kRows), shared.take<int64_t>(kRows)};
  }

  /// As WeightRows::load.
  template <int kRows, class... Operands>
  QKV_DEVICE void load(const BackwardTask<T>& task, int64_t batch, const PackedRows& packed,
                       int64_t first, const Operands&... operands) const {
    const BackwardParams<T>& params = task.backward;
    WeightRows<T>::template load<kRows>(params.problem, params.lse, params.lse_rest, batch, packed,
                                        first, operands...);
    if (const int r = device::thread(); r < kRows) {
      device::store_shared(
          delta + r, scalar_of_row<T>(params.problem, task.delta, batch, packed, first + r, T(0)));
    }
  }
};

/// The pairs of a thread from products to gradients,
///
///     s: U -> R ∘ P       g: dO Vᵀ -> dU, or dS if kOfScores
///
/// both 0 where the pair is not kept. With kOwnsKeys keys are the tile's own side, else rows.
/// slope_sums[row] -= dS · |p - j|, unless nullptr. Returns which pairs are kept.
template <bool kOwnsKeys, bool kOfScores, class T, int kOwn>
QKV_DEVICE uint32_t through_softmax(const Scores<T>& scores, const BackwardRows<T>& table,
                                    int64_t first_key, int rows, int keys, bool partial,
                                    T drop_scale, T (&s)[kOwn][kOthersOfThread],
                                    T (&g)[kOwn][kOthersOfThread], T* slope_sums) {
  if (!partial && !scores.changes() && !scores.drops()) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOthersOfThread; ++j) {
        const int r = kOwnsKeys ? thread_x() * kOthersOfThread + j : thread_y() * kOwn + i;
        s[i][j] = table.probability(r, s[i][j]);
        g[i][j] = s[i][j] * (g[i][j] - device::load_shared(table.delta + r));
      }
    }
    return 0xffffffff;
  }
  T pairs[kOwn * kOthersOfThread], products[kOwn * kOthersOfThread];
  copy_pairs(s, pairs);
  copy_pairs(g, products);
  const uint32_t kept = for_each_kept_pair<kOwnsKeys>(
      scores, table.tile, first_key, rows, keys, pairs, [&](const KeptPair<T>& x) {
        const T weight = table.probability(x.r, x.score);
        const T dp = x.stays ? products[x.number] * drop_scale : T(0);
        T ds = weight * (dp - device::load_shared(table.delta + x.r));
        if (slope_sums != nullptr) {
          slope_sums[x.row] -= ds * scores.distance(table.tile, x.r, x.key);
        }
        if (!kOfScores) ds *= T(1) - x.cap * x.cap;
        pairs[x.number] = x.stays ? weight * drop_scale : T(0);
        products[x.number] = ds;
      });
  copy_kept_pairs(kept, pairs, s);
  copy_kept_pairs(kept, products, g);
  return kept;
}

template <class T, int kColumns>
using BackwardShared = WeightShared<T, kColumns, BackwardRows<T>>;

/// delta of each row, a warp a row. Whatever comes for the output of a row without keys, NaN as
/// well, does not matter.
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
    const Element* rest_row = sizeof(Element) == 2 ? row(params.out_rest) : nullptr;
    const Element* grad_row = row(params.grad_out);
    T sum = T(0);
    for (int64_t column = lane; column < p.value_dim; column += device::kWarp) {
      T out = load_number(out_row + column);
      if constexpr (sizeof(Element) == 2) out += load_number(rest_row + column);
      sum += load_number(grad_row + column) * out;
    }
    sum = sum_of_lanes<device::kWarp>(sum);
    if (has_no_keys(device::load_global(params.lse_rest + unit))) sum = T(0);
    if (params.grad_lse != nullptr) sum -= device::load_global(params.grad_lse + unit);
    if (lane == 0) device::store_global(task.delta + unit, sum);
  }
}

/// A block's columns of grad_query, without the scale; and sums for the slopes, of its 16 threads
/// that share rows.
template <class Element, int kOwn, int kColumns, class Unit>
QKV_DEVICE void write_query_gradient(const BackwardParams<Real<Element>>& params, const Unit& u,
                                     const RowTile& tile,
                                     const volatile Real<Element> (&grad)[kOwn][kColumns],
                                     const volatile Real<Element> (&slope_gradient)[kOwn]) {
  using T = Real<Element>;
  const Problem<T>& p = params.problem;
  Element* grad_query = batch_of<Element>(p, params.grad_query, u.batch);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int r = thread_y() * kOwn + i;
    const T slope_gradient_of_row = sum_of_lanes<kSide>(slope_gradient[i]);
    if (r >= u.rows) continue;
    if (params.slope_gradient_of_rows != nullptr && u.chunk == 0 && thread_x() == 0) {
      device::store_global(params.slope_gradient_of_rows + tile.scalar(p, u.batch, r),
                           slope_gradient_of_row);
    }
    if (params.grad_query.data == nullptr) continue;
    Element* row = tile.row(grad_query, params.grad_query, r);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = u.first_column + column_of_thread(j);
      if (column < p.head_dim) {
        store_number(row + column * params.grad_query.column_stride, p.scale * grad[i][j]);
      }
    }
  }
}

template <class Element, int kOwn, int kColumns>
QKV_DEVICE void grad_query_unit(const BackwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  const BackwardShared<T, kColumns> shared(device::shared_memory());
  const RowUnit<kOwns, kWidth> u(p, unit, p.head_dim);

  const BackwardRows<T>& table = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, p.scale, table.query_offsets);
  const auto grad_out =
      TileRows<Element>::of(p, params.grad_out, u.batch, T(1), table.grad_out_offsets);
  device::barrier();
  table.template load<kOwns>(task, u.batch, u.packed, u.first_row, query, grad_out);
  device::barrier();
  const Scores<T> scores(p, u.batch);
  const T drop_scale = dropout_scale<T>(p.dropout);

  // Of a group of tiles, and of all.
  T grad[kOwn][kColumns], slope_gradient[kOwn] = {};
  volatile T grad_of_all[kOwn][kColumns], slope_gradient_of_all[kOwn] = {};
  set_to_zero(grad);
  set_to_zero(grad_of_all);
  const auto key = TileKeys<Element>::of_head(p, p.key, u.batch, u.kv_head);
  const auto value = TileKeys<Element>::of_head(p, p.value, u.batch, u.kv_head);
  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    T s[kOwn][kOthersOfThread], g[kOwn][kOthersOfThread];
    multiply_pairs<kOwn>(query, key.tile(n, keys), p.head_dim, shared.stages, s);
    multiply_pairs<kOwn>(grad_out, value.tile(n, keys), p.value_dim, shared.stages, g);
    const uint32_t kept = through_softmax<false, false>(
        scores, table, n, u.rows, keys, partial, drop_scale, s, g,
        params.slope_gradient_of_rows != nullptr ? slope_gradient : nullptr);
    store_pairs(g, shared.numbers);
    device::store_shared(shared.kept + device::thread(), kept);
    multiply_columns(OwnTile<T>{shared.numbers, shared.kept, partial}, key.tile(n, keys), keys,
                     u.first_column, p.head_dim, shared.stages, grad);
  };
  u.for_each_tile(p, u.keys_of_any(p), scores.masks(), add_tile, [&] {
    end_group(grad, grad_of_all);
    end_group(slope_gradient, slope_gradient_of_all);
  });

  write_query_gradient<Element>(params, u, table.tile, grad_of_all, slope_gradient_of_all);
}

template <class Element, int kOwn, int kColumns>
QKV_KERNEL(kThreadsOfTile<kOwn>, (blocks_at_once<Real<Element>, kOwn>(kOwn * (8 + kColumns))))
grad_query_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_query_unit<Element, kOwn, kColumns>(task, unit);
  }
}

/// A block's columns of grad_key or grad_value, which has `columns`.
template <class Element, int kOwn, int kColumns, class Unit>
QKV_DEVICE void write_key_gradient(const Problem<Real<Element>>& p,
                                   const Operand<Real<Element>>& grad, const Unit& u,
                                   int64_t columns,
                                   const volatile Real<Element> (&numbers)[kOwn][kColumns]) {
  Element* of_head = batch_of<Element>(p, grad, u.batch) + u.kv_head * grad.head_stride;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int k = thread_y() * kOwn + i;
    if (k >= u.keys) break;
    const int64_t key = u.first_key + k;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = u.first_column + column_of_thread(j);
      if (column < columns) {
        store_number(of_head + key * grad.row_stride + column * grad.column_stride, numbers[i][j]);
      }
    }
  }
}

/// Whether the kernel that owns rows, or the one that owns keys, has anything to do.
template <class T>
bool needs_grad_query(const BackwardParams<T>& params) {
  return params.grad_query.data != nullptr || params.slope_gradient_of_rows != nullptr;
}
template <class T>
bool needs_grad_key(const BackwardParams<T>& params) {
  return params.grad_key.data != nullptr || params.grad_value.data != nullptr;
}

/// Columns that the kernel for keys has to cover.
template <class T>
QKV_INLINE int64_t widest_gradient(const Problem<T>& p) {
  return p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
}

template <class Element, int kOwn, int kColumns>
QKV_DEVICE void grad_key_unit(const BackwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  const BackwardShared<T, kColumns> shared(device::shared_memory());
  const KeyUnit<kOwns, kWidth> u(p, unit, widest_gradient(p));
  const bool need_key = params.grad_key.data != nullptr && u.first_column < p.head_dim;
  const bool need_value = params.grad_value.data != nullptr && u.first_column < p.value_dim;
  if (!need_key && !need_value) return;

  const BackwardRows<T>& table = shared.rows;
  const Scores<T> scores(p, u.batch);
  const auto query = TileRows<Element>::of(p, p.query, u.batch, p.scale, table.query_offsets);
  const auto grad_out =
      TileRows<Element>::of(p, params.grad_out, u.batch, T(1), table.grad_out_offsets);
  const auto keys_of = [&](const Operand<const T>& x) {
    return TileKeys<Element>::of_head(p, x, u.batch, u.kv_head).tile(u.first_key, u.keys);
  };
  const auto key = keys_of(p.key), value = keys_of(p.value);
  const T drop_scale = dropout_scale<T>(p.dropout);

  // Of a group of tiles, and of all.
  T grad_key[kOwn][kColumns], grad_value[kOwn][kColumns];
  volatile T grad_key_of_all[kOwn][kColumns], grad_value_of_all[kOwn][kColumns];
  set_to_zero(grad_key);
  set_to_zero(grad_key_of_all);
  set_to_zero(grad_value);
  set_to_zero(grad_value_of_all);
  const auto add_tile = [&](int64_t first_row, int rows, bool partial) {
    device::barrier();
    table.template load<kOthers>(task, u.batch, u.packed, first_row, query, grad_out);
    device::barrier();

    T s[kOwn][kOthersOfThread], g[kOwn][kOthersOfThread];
    multiply_pairs<kOwn>(key, query, p.head_dim, shared.stages, s);
    multiply_pairs<kOwn>(value, grad_out, p.value_dim, shared.stages, g);
    const uint32_t kept =
        through_softmax<true, false>(scores, table, u.first_key, rows, u.keys, partial, drop_scale,
                                     s, g, static_cast<T*>(nullptr));
    device::store_shared(shared.kept + device::thread(), kept);
    const OwnTile<T> own_tile{shared.numbers, shared.kept, partial};
    if (need_value) {
      store_pairs(s, shared.numbers);
      multiply_columns(own_tile, grad_out, rows, u.first_column, p.value_dim, shared.stages,
                       grad_value);
    }
    if (need_key) {
      store_pairs(g, shared.numbers);
      multiply_columns(own_tile, query, rows, u.first_column, p.head_dim, shared.stages, grad_key);
    }
  };
  u.for_each_tile(p, scores.masks(), add_tile, [&] {
    end_group(grad_key, grad_key_of_all);
    end_group(grad_value, grad_value_of_all);
  });

  if (need_key) write_key_gradient<Element>(p, params.grad_key, u, p.head_dim, grad_key_of_all);
  if (need_value) {
    write_key_gradient<Element>(p, params.grad_value, u, p.value_dim, grad_value_of_all);
  }
}

template <class Element, int kOwn, int kColumns>
QKV_KERNEL(kThreadsOfTile<kOwn>, (blocks_at_once<Real<Element>, kOwn>(kOwn * (8 + 2 * kColumns))))
grad_key_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_key_unit<Element, kOwn, kColumns>(task, unit);
  }
}

}  // namespace qkv::kernels::simt
