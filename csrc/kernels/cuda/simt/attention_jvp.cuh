#pragma once

#include "kernels/cuda/simt/tangents.cuh"
#include "kernels/cuda/simt/tasks.h"
#include "kernels/logsumexp.h"

// The derivative of attention along directions of its operands, in one pass over the keys or two. W
// is the weight of the sink, R what dropout multiplies the weights with (tangents.cuh has S').
//
//     lse' = rowsum(P ∘ S') + W ∘ sink'
//     O'   = (R ∘ P ∘ S') V + (R ∘ P) V' - lse' ∘ O
//
// Of operands in 16 bits, whose O was stored in them and may be of rounded weights, a pass before
// finds the mean that P gives the S' of a row. It is taken from these and from sink', so that what
// they have in common is not multiplied with the rounding, as on a CPU
// (kernels/cpu/attention_jvp.inc.h).
//
// A block owns 64 packed rows of one key/value head and 16 · kColumns columns of O':
//
//     for 64 keys at a time:   S, S'                 [rows][64]       in registers
//                              R ∘ P ∘ S', R ∘ P     [64][rows]       to shared memory, in turn
//                              O'                    [rows][columns]  in registers
//
// With all directions these are 5 products, where the forward has 2. What does not move costs none.

namespace qkv::kernels::simt {

/// What is known of a tile's rows, in shared memory.
template <class T>
struct JvpRows : WeightRows<T> {
  int64_t* query_offsets;
  int64_t* query_t_offsets;

  template <int kRows>
  static constexpr QKV_INLINE JvpRows in(SharedMemory& shared) {
    return {WeightRows<T>::template in<kRows>(shared), shared.take<int64_t>(kRows),
            shared.take<int64_t>(kRows)};
  }
};

template <class T, int kColumns>
using JvpShared = WeightShared<T, kColumns, JvpRows<T>>;

/// The pairs of a thread from products to weights,
///
///     s: U -> R ∘ P       s_t: U' -> R ∘ P ∘ (S' - mean)
///
/// both 0 where the pair is not kept. lse_t[row] += P ∘ (S' - mean). Returns which pairs are kept.
template <class T>
QKV_DEVICE uint32_t weigh_pairs(const MovingScores<T>& scores, const WeightRows<T>& table,
                                int64_t first_key, int rows, int keys, bool partial, T drop_scale,
                                const T (&mean)[kLeastOwn], T (&s)[kLeastOwn][kOthersOfThread],
                                T (&s_t)[kLeastOwn][kOthersOfThread], T (&lse_t)[kLeastOwn]) {
  if (!partial && !scores.changes() && !scores.drops()) {
#pragma unroll
    for (int i = 0; i < kLeastOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOthersOfThread; ++j) {
        s[i][j] = table.probability(thread_y() * kLeastOwn + i, s[i][j]);
        s_t[i][j] = s[i][j] * (s_t[i][j] - mean[i]);
        lse_t[i] += s_t[i][j];
      }
    }
    return 0xffffffff;
  }
  T pairs[16], moving[16];
  copy_pairs(s, pairs);
  copy_pairs(s_t, moving);
  const uint32_t kept = for_each_kept_pair<false>(
      scores, table.tile, first_key, rows, keys, pairs, [&](const KeptPair<T>& x) {
        const T weight = table.probability(x.r, x.score);
        const T score_t = scores.derivative(table.tile, x, moving[x.number]);
        const T weighted = weight * (score_t - mean[x.row]);
        lse_t[x.row] += weighted;
        pairs[x.number] = x.stays ? weight * drop_scale : T(0);
        moving[x.number] = x.stays ? weighted * drop_scale : T(0);
      });
  copy_kept_pairs(kept, pairs, s);
  copy_kept_pairs(kept, moving, s_t);
  return kept;
}

/// What a tile adds to a row's weights, and to S' times these, from the products of weigh_pairs.
template <class T>
QKV_DEVICE void add_to_means(const MovingScores<T>& scores, const WeightRows<T>& table,
                             int64_t first_key, int rows, int keys, bool partial,
                             T (&s)[kLeastOwn][kOthersOfThread],
                             T (&s_t)[kLeastOwn][kOthersOfThread], T (&weights)[kLeastOwn],
                             T (&moved)[kLeastOwn]) {
  const T no_mean[kLeastOwn] = {};
  T unused[kLeastOwn] = {};
  weigh_pairs(scores, table, first_key, rows, keys, partial, /*drop_scale=*/T(1), no_mean, s, s_t,
              unused);
#pragma unroll
  for (int i = 0; i < kLeastOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) {
      weights[i] += s[i][j];
      moved[i] += s_t[i][j];
    }
  }
}

template <class Element, int kColumns>
QKV_DEVICE void jvp_unit(const JvpTask<Real<Element>>& task, int64_t unit) {
  using T = Real<Element>;
  constexpr int kWidth = kSide * kColumns;
  const JvpParams<T>& params = task.jvp;
  const Problem<T>& p = params.problem;
  const Directions<T>& along = params.directions;
  const JvpShared<T, kColumns> shared(device::shared_memory());
  const RowUnit<kOwns, kWidth> u(p, unit, p.value_dim);
  const auto depth = MovingDepths::of(p, along);
  const bool moves = scores_move(along), value_moves = along.value.data != nullptr;

  const JvpRows<T>& table = shared.rows;
  const RowTile& tile = table.tile;
  const Moving<TileRows<Element>> query{
      TileRows<Element>::of(p, p.query, u.batch, p.scale, table.query_offsets),
      TileRows<Element>::of(p, along.query, u.batch, p.scale, table.query_t_offsets)};
  device::barrier();
  table.template load<kOwns>(p, params.lse, params.lse_rest, u.batch, u.packed, u.first_row,
                             query.operand, query.direction);
  device::barrier();
  const MovingScores<T> scores(p, along, u.batch);
  const KeyRange any = moves || value_moves ? u.keys_of_any(p) : KeyRange{0, 0};
  const T drop_scale = dropout_scale<T>(p.dropout);

  // Of a group of tiles, and of all.
  T out_t[kLeastOwn][kColumns], lse_t[kLeastOwn] = {};
  volatile T out_t_of_all[kLeastOwn][kColumns], lse_t_of_all[kLeastOwn] = {};
  set_to_zero(out_t);
  set_to_zero(out_t_of_all);
  const auto key = moving_keys<Element>(p, p.key, along.key, u.batch, u.kv_head);
  const auto value = moving_keys<Element>(p, p.value, along.value, u.batch, u.kv_head);
  T mean[kLeastOwn] = {}, of_keys[kLeastOwn] = {};  // what P gives of S', and of all weights
  if constexpr (sizeof(Element) == 2) {
    if (moves) {
      T weights[kLeastOwn] = {}, moved[kLeastOwn] = {};
      const auto add_tile = [&](int64_t n, int keys, bool partial) {
        T s[kLeastOwn][kOthersOfThread], s_t[kLeastOwn][kOthersOfThread];
        multiply_scores<false>(query, tile_of(key, n, keys), p.head_dim, depth, shared.stages, s,
                               s_t);
        add_to_means(scores, table, n, u.rows, keys, partial, s, s_t, weights, moved);
      };
      u.for_each_tile(p, any, scores.masks(), add_tile, [] {});
#pragma unroll
      for (int i = 0; i < kLeastOwn; ++i) {
        of_keys[i] = sum_of_lanes<kSide>(weights[i]);
        const T x = sum_of_lanes<kSide>(moved[i]) / of_keys[i];
        if (x - x == T(0)) mean[i] = x;  // of a row that keeps a key, if it is finite
      }
    }
  }
  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    T s[kLeastOwn][kOthersOfThread], s_t[kLeastOwn][kOthersOfThread];
    multiply_scores<false>(query, tile_of(key, n, keys), p.head_dim, depth, shared.stages, s, s_t);
    const uint32_t kept =
        weigh_pairs(scores, table, n, u.rows, keys, partial, drop_scale, mean, s, s_t, lse_t);
    device::store_shared(shared.kept + device::thread(), kept);
    multiply_moving_columns(OwnTile<T>{shared.numbers, shared.kept, partial}, moves, s_t,
                            value_moves, s, tile_of(value, n, keys), keys, u.first_column,
                            p.value_dim, shared.stages, out_t);
  };
  u.for_each_tile(p, any, scores.masks(), add_tile, [&] {
    end_group(out_t, out_t_of_all);
    end_group(lse_t, lse_t_of_all);
  });

  const Element* out = batch_of<Element>(p, params.out, u.batch);
  const Element* out_rest = batch_of<Element>(p, task.out_rest, u.batch);
  Element* to = batch_of<Element>(p, params.out_t, u.batch);
  Element* to_rest = batch_of<Element>(p, task.out_t_rest, u.batch);
#pragma unroll
  for (int i = 0; i < kLeastOwn; ++i) {
    const int r = thread_y() * kLeastOwn + i;
    T lse_t_of_row = sum_of_lanes<kSide>(lse_t_of_all[i]);
    if (r >= u.rows) continue;
    const int64_t head = device::load_shared(tile.head + r), scalar = tile.scalar(p, u.batch, r);
    const T rest = device::load_global(params.lse_rest + scalar);
    T weight = T(0), sink_t = T(0);
    if (p.sinks.data != nullptr) {
      weight = sink_weight(number_of_head(p, p.sinks, u.batch, head),
                           device::load_global(params.lse + scalar), rest);
      if (along.sinks.data != nullptr) sink_t = number_of_head(p, along.sinks, u.batch, head);
    }
    // What is dropped was left out of these sums.
    const T all_of_keys = p.dropout.threshold == 0 ? of_keys[i] : T(1) - weight;
    if (u.chunk == 0 && thread_x() == 0) {
      device::store_global(params.lse_t + scalar,
                           lse_t_of_row + mean_with_sink(mean[i], all_of_keys, weight, sink_t));
    }
    lse_t_of_row += weight * (sink_t - mean[i]);
    if (has_no_keys(rest)) lse_t_of_row = T(0);  // its output stays 0, whatever its sink does
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = u.first_column + column_of_thread(j);
      if (column >= p.value_dim) continue;
      T out_ij = load_number(tile.row(out, params.out, r) + column);
      if constexpr (sizeof(Element) == 2) {
        out_ij += load_number(tile.row(out_rest, task.out_rest, r) + column);
      }
      const T x = out_t_of_all[i][j] - lse_t_of_row * out_ij;
      store_number(tile.row(to, params.out_t, r) + column * params.out_t.column_stride, x);
      if (sizeof(Element) == 2 && task.out_t_rest.data != nullptr) {
        store_rest(tile.row(to_rest, task.out_t_rest, r) + column * task.out_t_rest.column_stride,
                   x);
      }
    }
  }
}

template <class Element, int kColumns>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(32 + 8 * kColumns))
attention_jvp_kernel(QKV_PARAMS JvpTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    jvp_unit<Element, kColumns>(task, unit);
  }
}

}  // namespace qkv::kernels::simt
