#pragma once

#include "kernels/cuda/simt/attention_backward.cuh"
#include "kernels/cuda/sm80/pair_line.cuh"
#include "kernels/cuda/sm80/result.cuh"

// Backward attention with tensor cores, as the kernels for any GPU have it: each number of a
// gradient has one owner, P and dS are computed twice.
//
//     P = exp(S - lse)     dP = R ∘ (dO Vᵀ)     dS = P ∘ (dP - delta)     dU = softcap' ∘ dS
//
//     grad_query_kernel    owns 64 rows    dQ = scale · dU K          and row sums for the slopes
//     grad_key_kernel      owns 64 keys    dV = (R ∘ P)ᵀ dO, dK = scale · dUᵀ Q
//
// A warp owns 16 of them, and pairs with 64 others at a time: all that is summed is in registers. P
// and dU are multiplied in two parts, so that gradients are rounded once. The next tile of others
// is on its way to shared memory while one is multiplied.

namespace qkv::kernels::sm80 {

constexpr int kOwnRows = kThreadsOfBlock / device::kWarp * kRowsOfProduct;

/// Columns of a tile in shared memory of which products of the second kind read kWidth at a time.
template <int kWidth>
constexpr QKV_INLINE int64_t whole_chunks(int64_t columns) {
  return (columns + kWidth - 1) / kWidth * kWidth;
}

/// What a block has in shared memory: its own Q and dO, or K and V, the others in one stage or two,
/// and a table of the rows, or two if these are the others.
template <class Element, int kWidth, bool kOwnsKeys>
struct BackwardTiles {
  static constexpr bool kOwnKeys = kOwnsKeys;
  static constexpr int kTables = kOwnsKeys ? 2 : 1;

  SharedMemory memory;
  int step, value_step;
  Element* own = memory.take<Element>(kOwnRows * step);
  Element* own_values = memory.take<Element>(kOwnRows * value_step);
  Element* others;
  Element* other_values;
  BackwardRows<float> rows = BackwardRows<float>::template in<kTables * kOthers>(memory);

  constexpr QKV_INLINE BackwardTiles(char* begin, int64_t head_dim, int64_t value_dim, int stages)
      : memory(begin),
        step(row_step(whole_chunks<kWidth>(head_dim))),
        value_step(row_step(kOwnsKeys ? whole_chunks<kWidth>(value_dim) : value_dim)),
        others(memory.take<Element>(stages * kOthers * step)),
        other_values(memory.take<Element>(stages * kOthers * value_step)) {}

  /// A tile of others, and of their values, in one of the stages.
  QKV_DEVICE Element* others_in(int stage) const { return others + stage * kOthers * step; }
  QKV_DEVICE Element* other_values_in(int stage) const {
    return other_values + stage * kOthers * value_step;
  }

  /// One of the tables.
  QKV_DEVICE BackwardRows<float> rows_in(int table) const {
    const int at = table * kOthers;
    BackwardRows<float> x = rows;
    x.tile = {x.tile.query + at, x.tile.head + at, x.tile.begin + at, x.tile.end + at};
    x.lse += at;
    x.lse_rest += at;
    x.delta += at;
    x.query_offsets += at;
    x.grad_out_offsets += at;
    return x;
  }
};

/// P of a score that is kept. Rounding can leave a score of 1e8 above its lse; without the clamp P
/// would overflow.
QKV_DEVICE float probability(const BackwardRows<float>& table, int r, float score) {
  const float lse = device::load_shared(table.lse + r);
  return device::approximate_exp(
      minimum(0.0f, score - lse - device::load_shared(table.lse_rest + r)));
}

/// The lines of a tile through softmax, as below: weights from scale · <q, k>. They have their own
/// row or key 8 apart from first_own on, rows in a table of a block's Tiles. Returns which are
/// kept.
template <class Tiles>
QKV_DEVICE_ASIDE uint32_t lines_through_softmax(const Problem<float>& p, int64_t batch, int stages,
                                                int turn, int first_own, int64_t first_key,
                                                int keys, float (*weights)[kPairsOfLine],
                                                float (*gradients)[kPairsOfLine],
                                                float* slope_sums) {
  const BackwardRows<float> table =
      Tiles(device::shared_memory(), p.head_dim, p.value_dim, stages).rows_in(turn);
  const Scores<float> scores(p, batch);
  const float drop_scale = dropout_scale<float>(p.dropout);
  uint32_t kept = 0;
#pragma unroll 1
  for (int line = 0; line < 2; ++line) {
    const PairLine<Tiles::kOwnKeys> pairs(scores, table.tile,
                                          first_own + line * 8 + row_of_number(0), first_key, keys);
    float x[kPairsOfLine], cap[kPairsOfLine];
#pragma unroll
    for (int j = 0; j < kPairsOfLine; ++j) x[j] = weights[line][j];
    const uint32_t kept_here = pairs.modify(x, cap);
    const uint32_t stay = scores.drops() ? pairs.stays() : 0xffff;
    float slope_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPairsOfLine; ++j) {
      const bool keeps = kept_here >> j & 1, stays = stay >> j & 1;
      const float weight = probability(table, pairs.row(j), x[j]);
      const float dp = stays ? gradients[line][j] * drop_scale : 0.0f;
      const float ds = weight * (dp - device::load_shared(table.delta + pairs.row(j)));
      if (slope_sums != nullptr) slope_sum += keeps ? ds * pairs.distance(j) : 0.0f;
      weights[line][j] = keeps && stays ? weight * drop_scale : 0.0f;
      gradients[line][j] = keeps ? ds * (1.0f - cap[j] * cap[j]) : 0.0f;
    }
    if (slope_sums != nullptr) slope_sums[line] -= slope_sum;
    kept |= kept_here << line * kPairsOfLine;
  }
  return kept;
}

/// Pairs of a warp's tile from products to gradients,
///
///     s: <q, k> -> R ∘ P       g: dO Vᵀ -> dU
///
/// both 0 where the pair is not kept. slope_sums[half] -= dS · |p - j|, unless nullptr. Returns
/// which are kept.
template <class Tiles>
QKV_DEVICE uint32_t through_softmax(const Problem<float>& p, int64_t batch, const Tiles& shared,
                                    int stages, int turn, int first_own, int64_t first_key,
                                    int keys, bool partial, float (&s)[kTilesOfOthers][4],
                                    float (&g)[kTilesOfOthers][4], float* slope_sums) {
  constexpr bool kOwnsKeys = Tiles::kOwnKeys;
  uint32_t kept = 0xffffffff;
  if (!changes_scores(p) && !drops_weights(p)) {
    const BackwardRows<float> table = shared.rows_in(turn);
#pragma unroll
    for (int n = 0; n < kTilesOfOthers; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = kOwnsKeys ? n * 8 + column_of_number(i) : first_own + row_of_number(i);
        const float weight = probability(table, r, p.scale * s[n][i]);
        s[n][i] = weight;
        g[n][i] = weight * (g[n][i] - device::load_shared(table.delta + r));
      }
    }
    if (!partial) return kept;
#pragma unroll
    for (int n = 0; n < kTilesOfOthers; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = first_own + row_of_number(i), other = n * 8 + column_of_number(i);
        const int r = kOwnsKeys ? other : own, k = kOwnsKeys ? own : other;
        const int64_t key = first_key + k;
        const bool keep = k < keys && key >= device::load_shared(table.tile.begin + r) &&
                          key < device::load_shared(table.tile.end + r);
        s[n][i] = keep ? s[n][i] : 0.0f;
        g[n][i] = keep ? g[n][i] : 0.0f;
        kept &= ~(static_cast<uint32_t>(!keep) << bit_of_number(n, i));
      }
    }
    return kept;
  }
  float weights[2][kPairsOfLine], gradients[2][kPairsOfLine];
#pragma unroll
  for (int i = 0; i < 2 * kPairsOfLine; ++i) {
    const int line = i / kPairsOfLine, j = i % kPairsOfLine;
    weights[line][j] = p.scale * s[product_of_pair(j)][number_of_pair(line, j)];
    gradients[line][j] = g[product_of_pair(j)][number_of_pair(line, j)];
  }
  kept = lines_through_softmax<Tiles>(p, batch, stages, turn, first_own, first_key, keys, weights,
                                      gradients, slope_sums);
#pragma unroll
  for (int i = 0; i < 2 * kPairsOfLine; ++i) {
    const int line = i / kPairsOfLine, j = i % kPairsOfLine;
    s[product_of_pair(j)][number_of_pair(line, j)] = weights[line][j];
    g[product_of_pair(j)][number_of_pair(line, j)] = gradients[line][j];
  }
  return kept;
}

/// pairs = the warp's own rows times the others, along `columns`.
template <class Element>
QKV_DEVICE void multiply_rows(const Element* own, const Element* others, int step, int64_t columns,
                              Pairs<1>& pairs) {
  set_to_zero(pairs[0]);
  const auto left = [&](int, int k, uint32_t(&a)[4]) {
    load_left(own + k * kStepOfProduct, step, a);
  };
  const int steps = static_cast<int>(ceil_divide(columns, kStepOfProduct));
#pragma unroll 2
  for (int k = 0; k < steps; ++k) multiply_step<Element, 1>(left, others, step, k, pairs);
}

/// Pairs in two parts, as the left side of products with others of a type. It may refer to them.
QKV_DEVICE HalfPairs<BFloat16, 2, 1> in_two_parts(const Pairs<1>& pairs, const BFloat16*) {
  return HalfPairs<BFloat16, 2, 1>(pairs);
}
QKV_DEVICE Tf32Pairs<1> in_two_parts(const Pairs<1>& pairs, const Float16*) {
  return Tf32Pairs<1>(pairs);
}

/// sums += pairs · others. not_all: some pairs may not be kept.
template <class Element, int kWidth>
QKV_DEVICE void add_product(const Pairs<1>& pairs, bool not_all, uint32_t kept, Element* others,
                            int step, Sums<1, kWidth>& sums) {
  const auto parts = in_two_parts(pairs, others);
  if (not_all) {
    multiply_kept_pairs<kWidth>(parts, {kept}, others, step, sums);
  } else {
    multiply_pairs<kWidth>(parts, others, step, sums);
  }
}

template <class Element, int kWidth>
QKV_DEVICE void grad_query_unit(const BackwardTask<float>& task, int64_t unit, int stages) {
  const BackwardParams<float>& params = task.backward;
  const Problem<float>& p = params.problem;
  const BackwardTiles<Element, kWidth, false> shared(device::shared_memory(), p.head_dim,
                                                     p.value_dim, stages);
  const RowUnit<kOwnRows, kWidth> u(p, unit, p.head_dim);

  const BackwardRows<float>& table = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, 1.0f, table.query_offsets);
  const auto grad_out =
      TileRows<Element>::of(p, params.grad_out, u.batch, 1.0f, table.grad_out_offsets);
  device::barrier();
  table.template load<kOwnRows>(task, u.batch, u.packed, u.first_row, query, grad_out);
  device::barrier();

  const int width = shared.step - kPadOfRow, value_width = shared.value_step - kPadOfRow;
  const auto key = TileKeys<Element>::of_head(p, p.key, u.batch, u.kv_head);
  const auto value = TileKeys<Element>::of_head(p, p.value, u.batch, u.kv_head);
  const KeyRange any = u.keys_of_any(p);
  const auto copy_keys = [&](int64_t n, int stage) {
    const int count = at_most(kOthers, any.end - n);
    copy_rows<kOthers, kWidth>(key.tile(n, count), 0, p.head_dim, width, shared.others_in(stage),
                               shared.step);
    copy_rows<kOthers, kWidth>(value.tile(n, count), 0, p.value_dim, value_width,
                               shared.other_values_in(stage), shared.value_step);
  };
  copy_rows<kOwnRows, kWidth>(query, 0, p.head_dim, width, shared.own, shared.step);
  copy_rows<kOwnRows, kWidth>(grad_out, 0, p.value_dim, value_width, shared.own_values,
                              shared.value_step);
  if (!any.empty()) copy_keys(any.begin - any.begin % kOthers, 0);
  int stage = 0;

  const int first_own = warp() * kRowsOfProduct;
  // Of a group of tiles, and of all.
  Sums<1, kWidth> grad;
  volatile Sums<1, kWidth> grad_of_all = {};
  set_to_zero(grad[0]);
  float slope_gradient[2] = {};
  volatile float slope_gradient_of_all[2] = {};
  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    device::wait_for_copies();
    device::barrier();  // this tile is there, and nobody reads the one before
    const bool more = n + kOthers < any.end;
    if (more && stages == 2) copy_keys(n + kOthers, 1 - stage);
    Element* keys_now = shared.others_in(stage);
    Pairs<1> s, g;
    multiply_rows(shared.own + first_own * shared.step, keys_now, shared.step, p.head_dim, s);
    multiply_rows(shared.own_values + first_own * shared.value_step, shared.other_values_in(stage),
                  shared.value_step, p.value_dim, g);
    const uint32_t kept =
        through_softmax(p, u.batch, shared, stages, 0, first_own, n, keys, partial, s[0], g[0],
                        params.slope_gradient_of_rows != nullptr ? slope_gradient : nullptr);
    add_product<Element, kWidth>(g, partial, kept, keys_now + u.first_column, shared.step, grad);
    if (stages == 2) {
      stage = 1 - stage;
    } else if (more) {
      device::barrier();
      copy_keys(n + kOthers, 0);
    }
  };
  u.for_each_tile(p, any, has_masks(p), add_tile, [&] {
    end_group(grad[0], grad_of_all[0]);
    end_group(slope_gradient, slope_gradient_of_all);
  });
  device::wait_for_copies();

  Element* grad_query = batch_of<Element>(p, params.grad_query, u.batch);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = first_own + row_of_number(2 * half);
    const float sum = sum_of_lanes<4>(slope_gradient_of_all[half]);
    if (r >= u.rows) continue;
    if (params.slope_gradient_of_rows != nullptr && u.chunk == 0 && lane() % 4 == 0) {
      device::store_global(params.slope_gradient_of_rows + table.tile.scalar(p, u.batch, r), sum);
    }
    if (params.grad_query.data == nullptr) continue;
    write_row<kWidth, Element>(
        grad_of_all[0], half, p.scale, u.first_column, p.head_dim,
        {table.tile.row(grad_query, params.grad_query, r), params.grad_query.column_stride});
  }
}

template <class Element, int kWidth>
QKV_KERNEL(kThreadsOfBlock, 2)
grad_query_kernel(QKV_PARAMS BackwardTask<float> task, QKV_PARAMS int64_t units,
                  QKV_PARAMS int stages) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_query_unit<Element, kWidth>(task, unit, stages);
  }
}

/// What a row is asked for in global memory a tile before it is needed.
struct RowNumbers {
  float lse, lse_rest, delta;
};

template <class Element, int kWidth>
QKV_DEVICE void grad_key_unit(const BackwardTask<float>& task, int64_t unit, int stages) {
  const BackwardParams<float>& params = task.backward;
  const Problem<float>& p = params.problem;
  const BackwardTiles<Element, kWidth, true> shared(device::shared_memory(), p.head_dim,
                                                    p.value_dim, stages);
  const KeyUnit<kOwnRows, kWidth> u(p, unit, widest_gradient(p));
  const bool need_key = params.grad_key.data != nullptr && u.first_column < p.head_dim;
  const bool need_value = params.grad_value.data != nullptr && u.first_column < p.value_dim;
  if (!need_key && !need_value) return;

  const int width = shared.step - kPadOfRow, value_width = shared.value_step - kPadOfRow;
  const auto keys_of = [&](const Operand<const float>& x) {
    return TileKeys<Element>::of_head(p, x, u.batch, u.kv_head).tile(u.first_key, u.keys);
  };
  device::barrier();  // nobody reads the unit before
  copy_rows<kOwnRows, kWidth>(keys_of(p.key), 0, p.head_dim, width, shared.own, shared.step);
  copy_rows<kOwnRows, kWidth>(keys_of(p.value), 0, p.value_dim, value_width, shared.own_values,
                              shared.value_step);

  // Of two tiles of rows: one is multiplied while the other comes.
  const auto first_seeing_row = [&](int64_t first) {
    for (; first < u.packed.count; first += kOthers) {
      const int rows = at_most(kOthers, u.packed.count - first);
      if (u.is_seen(p, first, rows)) break;
    }
    return first;
  };
  const auto query_of = [&](int turn) {
    return TileRows<Element>::of(p, p.query, u.batch, 1.0f, shared.rows_in(turn).query_offsets);
  };
  const auto grad_out_of = [&](int turn) {
    return TileRows<Element>::of(p, params.grad_out, u.batch, 1.0f,
                                 shared.rows_in(turn).grad_out_offsets);
  };
  const auto find_rows = [&](int turn, int64_t first) {
    shared.rows_in(turn).tile.template load<kOthers>(p, u.packed, first, query_of(turn).offsets,
                                                     grad_out_of(turn).offsets);
  };
  const auto copy_rows_of = [&](int turn) {
    const int stage = turn % stages;
    copy_rows<kOthers, kWidth>(query_of(turn), 0, p.head_dim, width, shared.others_in(stage),
                               shared.step);
    copy_rows<kOthers, kWidth>(grad_out_of(turn), 0, p.value_dim, value_width,
                               shared.other_values_in(stage), shared.value_step);
  };
  const auto load_numbers = [&](int64_t first) {
    const int64_t row = first + device::thread() % kOthers;
    const auto of_row = [&](const float* x) {
      return scalar_of_row(p, x, u.batch, u.packed, row, 0.0f);
    };
    return RowNumbers{lse_of_row(p, params.lse, u.batch, u.packed, row), of_row(params.lse_rest),
                      of_row(task.delta)};
  };
  const auto store_numbers = [&](int turn, const RowNumbers& x) {
    const int r = device::thread();
    if (r >= kOthers) return;
    device::store_shared(shared.rows_in(turn).lse + r, x.lse);
    device::store_shared(shared.rows_in(turn).lse_rest + r, x.lse_rest);
    device::store_shared(shared.rows_in(turn).delta + r, x.delta);
  };

  const int first_own = warp() * kRowsOfProduct;
  Sums<1, kWidth> grad_key, grad_value;
  volatile Sums<1, kWidth> grad_key_of_all = {}, grad_value_of_all = {};
  set_to_zero(grad_key[0]);
  set_to_zero(grad_value[0]);
  int turn = 0;
  int64_t first_row = first_seeing_row(0);
  find_rows(turn, first_row);
  store_numbers(turn, load_numbers(first_row));
  device::barrier();
  copy_rows_of(turn);
  while (first_row < u.packed.count) {
    const int rows = at_most(kOthers, u.packed.count - first_row);
    const int64_t next_row = first_seeing_row(first_row + kOthers);
    const bool more = next_row < u.packed.count;
    device::wait_for_copies();
    device::barrier();  // this tile is there, and nobody reads the one before
    if (more) find_rows(1 - turn, next_row);
    device::barrier();
    if (more && stages == 2) copy_rows_of(1 - turn);
    const RowNumbers next_numbers = load_numbers(next_row);

    const bool partial = u.is_partial(p, first_row, rows, has_masks(p));
    Element* query = shared.others_in(turn % stages);
    Element* grad_out = shared.other_values_in(turn % stages);
    Pairs<1> s, g;
    multiply_rows(shared.own + first_own * shared.step, query, shared.step, p.head_dim, s);
    multiply_rows(shared.own_values + first_own * shared.value_step, grad_out, shared.value_step,
                  p.value_dim, g);
    const uint32_t kept = through_softmax(p, u.batch, shared, stages, turn, first_own, u.first_key,
                                          u.keys, partial, s[0], g[0], nullptr);
    if (need_value) {
      add_product<Element, kWidth>(s, partial, kept, grad_out + u.first_column, shared.value_step,
                                   grad_value);
    }
    if (need_key) {
      add_product<Element, kWidth>(g, partial, kept, query + u.first_column, shared.step, grad_key);
    }
    store_numbers(1 - turn, next_numbers);
    if (more && stages == 1) {
      device::barrier();
      copy_rows_of(1 - turn);
    }
    if (next_row >= end_of_group(first_row, u.packed.count)) {
      end_group(grad_key[0], grad_key_of_all[0]);
      end_group(grad_value[0], grad_value_of_all[0]);
    }
    turn = 1 - turn;
    first_row = next_row;
  }
  device::wait_for_copies();

  const auto write = [&](const Operand<float>& grad, int64_t columns, float factor,
                         const volatile Sums<1, kWidth>& sums) {
    Element* of_head = batch_of<Element>(p, grad, u.batch) + u.kv_head * grad.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = first_own + row_of_number(2 * half);
      if (k >= u.keys) continue;
      write_row<kWidth, Element>(
          sums[0], half, factor, u.first_column, columns,
          {of_head + (u.first_key + k) * grad.row_stride, grad.column_stride});
    }
  };
  if (need_key) write(params.grad_key, p.head_dim, p.scale, grad_key_of_all);
  if (need_value) write(params.grad_value, p.value_dim, 1.0f, grad_value_of_all);
}

template <class Element, int kWidth>
QKV_KERNEL(kThreadsOfBlock, 2)
grad_key_kernel(QKV_PARAMS BackwardTask<float> task, QKV_PARAMS int64_t units,
                QKV_PARAMS int stages) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    grad_key_unit<Element, kWidth>(task, unit, stages);
  }
}

}  // namespace qkv::kernels::sm80
