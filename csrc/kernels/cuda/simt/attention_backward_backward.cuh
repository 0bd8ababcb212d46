#pragma once

#include "kernels/cuda/simt/attention_backward.cuh"
#include "kernels/cuda/simt/tangents.cuh"

// The double backward. It is the derivative of the backward along the cotangents (x, y, z, ..) of
// its results taken as directions (Q', K', V', ..), by the symmetry of second derivatives
// (docs/derivations.md); its own results for dO and dLSE are O' and lse' of the jvp kernel, which
// runs before. A prime is a derivative along the directions:
//
//     dP  = R ∘ (dO Vᵀ)              dP'  = R ∘ (dO V'ᵀ)
//     dS  = P ∘ (dP - delta)         dS'  = (S' - lse') ∘ dS + P ∘ (dP' - delta')
//     dU  = f'(U) ∘ dS               dU'  = f'(U) ∘ dS' + (f'(U))' ∘ dS
//     delta = <dO, O> - dLSE         delta' = <dO, O'>            P' = P ∘ (S' - lse')
//
//     grad_query_t_kernel    owns rows    dQ' = scale · (dU' K + dU K')   and sums for the slopes
//     grad_key_t_kernel      owns keys    dV' = (R ∘ P')ᵀ dO, dK' = scale · (dU'ᵀ Q + dUᵀ Q')
//
// As in the backward each number has one owner, and both kernels compute the pairs: with all
// cotangents 7 and 8 products, where the backward's have 3 and 4. What does not move costs none.

namespace qkv::kernels::simt {

/// What the double backward knows of a tile's rows, in shared memory.
template <class T>
struct BackwardTangentRows : BackwardRows<T> {
  T* lse_t;
  T* delta_t;
  int64_t* query_t_offsets;

  template <int kRows>
  static constexpr QKV_INLINE BackwardTangentRows in(SharedMemory& shared) {
    return {BackwardRows<T>::template in<kRows>(shared), shared.take<T>(kRows),
            shared.take<T>(kRows), shared.take<int64_t>(kRows)};
  }

  /// As WeightRows::load.
  template <int kRows, class... Operands>
  QKV_DEVICE void load(const BackwardBackwardTask<T>& task, int64_t batch, const PackedRows& packed,
                       int64_t first, const Operands&... operands) const {
    const Problem<T>& p = task.backward.backward.problem;
    BackwardRows<T>::template load<kRows>(task.backward, batch, packed, first, operands...);
    if (const int r = device::thread(); r < kRows) {
      device::store_shared(lse_t + r, scalar_of_row(p, task.lse_t, batch, packed, first + r, T(0)));
      device::store_shared(delta_t + r,
                           scalar_of_row<T>(p, task.delta_t, batch, packed, first + r, T(0)));
    }
  }
};

/// The pairs of a thread from products to gradients and their derivatives,
///
///     s: U -> R ∘ P'      g:   dO Vᵀ  -> dU
///     s_t: U'             g_t: dO V'ᵀ -> dU', or dS' if kOfScores
///
/// 0 where the pair is not kept. With kOwnsKeys keys are the tile's own side, else rows.
/// slope_sums[row] -= dS' · |p - j|, unless nullptr. Returns which pairs are kept.
template <bool kOwnsKeys, bool kOfScores, class T>
QKV_DEVICE uint32_t tangents_through_softmax(const MovingScores<T>& scores,
                                             const BackwardTangentRows<T>& table, int64_t first_key,
                                             int rows, int keys, bool partial, T drop_scale,
                                             T (&s)[kLeastOwn][kOthersOfThread],
                                             const T (&s_t)[kLeastOwn][kOthersOfThread],
                                             T (&g)[kLeastOwn][kOthersOfThread],
                                             T (&g_t)[kLeastOwn][kOthersOfThread], T* slope_sums) {
  // P, S' -> P', dP -> dS, dP' -> dS'
  const auto derive = [&](int r, T weight, T score_t, T& weight_t, T& dp, T& dp_t) {
    const T growth = score_t - device::load_shared(table.lse_t + r);
    weight_t = weight * growth;
    dp = weight * (dp - device::load_shared(table.delta + r));
    dp_t = growth * dp + weight * (dp_t - device::load_shared(table.delta_t + r));
  };
  if (!partial && !scores.changes() && !scores.drops()) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = kOwnsKeys ? thread_x() * 4 + j : thread_y() * 4 + i;
        derive(r, table.probability(r, s[i][j]), s_t[i][j], s[i][j], g[i][j], g_t[i][j]);
      }
    }
    return 0xffffffff;
  }
  T pairs[16], moving[16], products[16], products_t[16];
  copy_pairs(s, pairs);
  copy_pairs(s_t, moving);
  copy_pairs(g, products);
  copy_pairs(g_t, products_t);
  const uint32_t kept = for_each_kept_pair<kOwnsKeys>(
      scores, table.tile, first_key, rows, keys, pairs, [&](const KeptPair<T>& x) {
        const T product_t = moving[x.number];
        T ds = x.stays ? products[x.number] * drop_scale : T(0);
        T ds_t = x.stays ? products_t[x.number] * drop_scale : T(0);
        T weight_t;
        derive(x.r, table.probability(x.r, x.score), scores.derivative(table.tile, x, product_t),
               weight_t, ds, ds_t);
        if (slope_sums != nullptr) {
          slope_sums[x.row] -= ds_t * scores.distance(table.tile, x.r, x.key);
        }
        if (!kOfScores) {
          ds_t = scores.cap_slope(x) * ds_t + scores.cap_slope_t(x, product_t) * ds;
          ds *= scores.cap_slope(x);
        }
        pairs[x.number] = x.stays ? weight_t * drop_scale : T(0);
        products[x.number] = ds;
        products_t[x.number] = ds_t;
      });
  copy_kept_pairs(kept, pairs, s);
  copy_kept_pairs(kept, products, g);
  copy_kept_pairs(kept, products_t, g_t);
  return kept;
}

template <class T, int kColumns>
using BackwardTangentShared = WeightShared<T, kColumns, BackwardTangentRows<T>>;

/// The rows of Q, Q' and dO in a tile of a batch element.
template <class Element>
struct TangentTileRows {
  Moving<TileRows<Element>> query;
  TileRows<Element> grad_out;

  template <class T>
  static QKV_DEVICE TangentTileRows of(const BackwardBackwardTask<T>& task, int64_t batch,
                                       const BackwardTangentRows<T>& table) {
    const BackwardParams<T>& params = task.backward.backward;
    const Problem<T>& p = params.problem;
    return {
        {TileRows<Element>::of(p, p.query, batch, p.scale, table.query_offsets),
         TileRows<Element>::of(p, task.directions.query, batch, p.scale, table.query_t_offsets)},
        TileRows<Element>::of(p, params.grad_out, batch, T(1), table.grad_out_offsets)};
  }
};

/// The keys of K, K', V and V' of a key/value head, or of a tile of them.
template <class Element>
struct TangentTileKeys {
  Moving<TileKeys<Element>> key;
  Moving<TileKeys<Element>> value;

  template <class T>
  static QKV_DEVICE TangentTileKeys of_head(const BackwardBackwardTask<T>& task, int64_t batch,
                                            int64_t kv_head) {
    const Problem<T>& p = task.backward.backward.problem;
    const Directions<T>& along = task.directions;
    return {moving_keys<Element>(p, p.key, along.key, batch, kv_head),
            moving_keys<Element>(p, p.value, along.value, batch, kv_head)};
  }

  QKV_DEVICE TangentTileKeys tile(int64_t first, int keys) const {
    return {tile_of(key, first, keys), tile_of(value, first, keys)};
  }
};

template <class Element, int kColumns>
QKV_DEVICE void grad_query_t_unit(const BackwardBackwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const BackwardParams<T>& params = task.backward.backward;
  const Problem<T>& p = params.problem;
  const BackwardTangentShared<T, kColumns> shared(device::shared_memory());
  const RowUnit<kOwns, kWidth> u(p, unit, p.head_dim);
  const auto depth = MovingDepths::of(p, task.directions);

  const BackwardTangentRows<T>& table = shared.rows;
  const auto own = TangentTileRows<Element>::of(task, u.batch, table);
  device::barrier();
  table.template load<kOwns>(task, u.batch, u.packed, u.first_row, own.query.operand,
                             own.query.direction, own.grad_out);
  device::barrier();
  const MovingScores<T> scores(p, task.directions, u.batch);
  const T drop_scale = dropout_scale<T>(p.dropout);

  // Of a group of tiles, and of all.
  T grad[kLeastOwn][kColumns], slope_gradient[kLeastOwn] = {};
  volatile T grad_of_all[kLeastOwn][kColumns], slope_gradient_of_all[kLeastOwn] = {};
  set_to_zero(grad);
  set_to_zero(grad_of_all);
  const auto head_keys = TangentTileKeys<Element>::of_head(task, u.batch, u.kv_head);
  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    const auto other = head_keys.tile(n, keys);
    T s[kLeastOwn][kOthersOfThread], s_t[kLeastOwn][kOthersOfThread];
    T g[kLeastOwn][kOthersOfThread], g_t[kLeastOwn][kOthersOfThread];
    multiply_scores<false>(own.query, other.key, p.head_dim, depth, shared.stages, s, s_t);
    multiply_grad_out<false>(own.grad_out, other.value, depth, shared.stages, g, g_t);
    const uint32_t kept = tangents_through_softmax<false, false>(
        scores, table, n, u.rows, keys, partial, drop_scale, s, s_t, g, g_t,
        params.slope_gradient_of_rows != nullptr ? slope_gradient : nullptr);
    device::store_shared(shared.kept + device::thread(), kept);
    multiply_moving_columns(OwnTile<T>{shared.numbers, shared.kept, partial}, true, g_t,
                            depth.key != 0, g, other.key, keys, u.first_column, p.head_dim,
                            shared.stages, grad);
  };
  u.for_each_tile(p, u.keys_of_any(p), scores.masks(), add_tile, [&] {
    end_group(grad, grad_of_all);
    end_group(slope_gradient, slope_gradient_of_all);
  });
  write_query_gradient<Element>(params, u, table.tile, grad_of_all, slope_gradient_of_all);
}

template <class Element, int kColumns>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(64 + 4 * kColumns))
grad_query_t_kernel(QKV_PARAMS BackwardBackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_query_t_unit<Element, kColumns>(task, unit);
  }
}

template <class Element, int kColumns>
QKV_DEVICE void grad_key_t_unit(const BackwardBackwardTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const BackwardParams<T>& params = task.backward.backward;
  const Problem<T>& p = params.problem;
  const BackwardTangentShared<T, kColumns> shared(device::shared_memory());
  const KeyUnit<kOwns, kWidth> u(p, unit, widest_gradient(p));
  const auto depth = MovingDepths::of(p, task.directions);
  const bool need_key = params.grad_key.data != nullptr && u.first_column < p.head_dim;
  const bool need_value = params.grad_value.data != nullptr && u.first_column < p.value_dim;
  if (!need_key && !need_value) return;

  const BackwardTangentRows<T>& table = shared.rows;
  const MovingScores<T> scores(p, task.directions, u.batch);
  const auto other = TangentTileRows<Element>::of(task, u.batch, table);
  const auto own =
      TangentTileKeys<Element>::of_head(task, u.batch, u.kv_head).tile(u.first_key, u.keys);
  const T drop_scale = dropout_scale<T>(p.dropout);

  // Of a group of tiles, and of all.
  T grad_key[kLeastOwn][kColumns], grad_value[kLeastOwn][kColumns];
  volatile T grad_key_of_all[kLeastOwn][kColumns], grad_value_of_all[kLeastOwn][kColumns];
  set_to_zero(grad_key);
  set_to_zero(grad_key_of_all);
  set_to_zero(grad_value);
  set_to_zero(grad_value_of_all);
  const auto add_tile = [&](int64_t first_row, int rows, bool partial) {
    device::barrier();
    table.template load<kOthers>(task, u.batch, u.packed, first_row, other.query.operand,
                                 other.query.direction, other.grad_out);
    device::barrier();

    T s[kLeastOwn][kOthersOfThread], s_t[kLeastOwn][kOthersOfThread];
    T g[kLeastOwn][kOthersOfThread], g_t[kLeastOwn][kOthersOfThread];
    multiply_scores<true>(other.query, own.key, p.head_dim, depth, shared.stages, s, s_t);
    multiply_grad_out<true>(other.grad_out, own.value, depth, shared.stages, g, g_t);
    const uint32_t kept =
        tangents_through_softmax<true, false>(scores, table, u.first_key, rows, u.keys, partial,
                                              drop_scale, s, s_t, g, g_t, static_cast<T*>(nullptr));
    device::store_shared(shared.kept + device::thread(), kept);
    const OwnTile<T> own_tile{shared.numbers, shared.kept, partial};
    if (need_value && depth.weights != 0) {
      store_pairs(s, shared.numbers);
      multiply_columns(own_tile, other.grad_out, rows, u.first_column, p.value_dim, shared.stages,
                       grad_value);
    }
    if (need_key) {
      multiply_moving_columns(own_tile, true, g_t, depth.query != 0, g, other.query, rows,
                              u.first_column, p.head_dim, shared.stages, grad_key);
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

template <class Element, int kColumns>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(64 + 8 * kColumns))
grad_key_t_kernel(QKV_PARAMS BackwardBackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_key_t_unit<Element, kColumns>(task, unit);
  }
}

}  // namespace qkv::kernels::simt
