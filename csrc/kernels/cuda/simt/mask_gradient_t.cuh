#pragma once

#include "kernels/cuda/simt/attention_backward_backward.cuh"
#include "kernels/cuda/simt/mask_gradient.cuh"

// The second derivative that reaches an additive mask, dmask' = dS', summed as dmask is.

namespace qkv::kernels::simt {

/// sum += dS' of a tile.
template <class Element, class EndTile>
QKV_DEVICE void add_score_gradients_t(
    const BackwardBackwardTask<Real<Element>>& task, const MaskRows& tile,
    const MaskGradientShared<Real<Element>, BackwardTangentRows<Real<Element>>>& shared,
    Real<Element> (&sum)[kLeastOwn][kOthersOfThread], EndTile end_tile) {
  using T = Real<Element>;
  const Problem<T>& p = task.backward.backward.problem;
  const int64_t kv_head = tile.head / (p.query_heads / p.kv_heads);
  const auto depth = MovingDepths::of(p, task.directions);
  const BackwardTangentRows<T>& table = shared.rows;
  const MovingScores<T> scores(p, task.directions, tile.batch);
  const auto own = TangentTileRows<Element>::of(task, tile.batch, table);
  const auto head_keys = TangentTileKeys<Element>::of_head(task, tile.batch, kv_head);
  const T drop_scale = dropout_scale<T>(p.dropout);
  device::barrier();
  table.template load<kOwns>(task, tile.batch, {tile.head, 1, p.queries}, tile.first_row,
                             own.query.operand, own.query.direction, own.grad_out);
  device::barrier();
  for (int64_t n = tile.keys.begin - tile.keys.begin % kOthers; n < tile.keys.end; n += kOthers) {
    const int keys = at_most(kOthers, tile.keys.end - n);
    const auto other = head_keys.tile(n, keys);
    T s[kLeastOwn][kOthersOfThread], s_t[kLeastOwn][kOthersOfThread];
    T g[kLeastOwn][kOthersOfThread], g_t[kLeastOwn][kOthersOfThread];
    multiply_scores<false>(own.query, other.key, p.head_dim, depth, shared.stages, s, s_t);
    multiply_grad_out<false>(own.grad_out, other.value, depth, shared.stages, g, g_t);
    tangents_through_softmax<false, true>(scores, table, n, tile.rows, keys, true, drop_scale, s,
                                          s_t, g, g_t, static_cast<T*>(nullptr));
    add_pairs(g_t, sum);
    end_tile();
  }
}

template <class Element>
QKV_KERNEL(kThreads, 1)
mask_gradient_t_kernel(QKV_PARAMS BackwardBackwardTask<Real<Element>> task,
                       QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const MaskGradientShared<T, BackwardTangentRows<T>> shared(device::shared_memory());
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    sum_over_mask(task.backward.backward.problem, task.backward.backward.grad_mask, unit,
                  shared.sums,
                  [&](const MaskRows& tile, T(&sum)[kLeastOwn][kOthersOfThread], auto end_tile) {
                    add_score_gradients_t<Element>(task, tile, shared, sum, end_tile);
                  });
  }
}

}  // namespace qkv::kernels::simt
