#pragma once

#include "kernels/cpu/attention_backward.inc.h"
#include "kernels/cpu/head_gradient.inc.h"
#include "kernels/cpu/mask_gradient.inc.h"
#include "kernels/cpu/tangent_tile.inc.h"

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
//     dV' = (R ∘ P')ᵀ dO    dK' = scale (dU'ᵀ Q + dUᵀ Q')    dQ' = scale (dU' K + dU K')
//
//     R ∘ P'    keys [ rows -> ]   x   dO          rows [ Dv -> ]  =   dV'  keys [ Dv -> ]
//     dU', dU   keys [ rows -> ]   x   Q, Q'       rows [ D -> ]   =   dK'  keys [ D -> ]
//     Kᵀ, K'ᵀ     D  [ keys -> ]   x   dU', dU     keys [ rows -> ] =  dQ'ᵀ   D [ rows -> ]
//
// With all cotangents: 10 products here and 5 in the jvp, where the backward has 5. The work is cut
// as in the backward, into ranges of keys that own dK' and dV' and leave parts of dQ'.

namespace qkv::kernels::QKV_ISA {

/// dS, dS' and R ∘ P' of one tile of rows and one block of keys.
template <class T>
struct BackwardTangentTile : TangentTile<T> {
  using Base = TangentTile<T>;
  using S = Simd<T>;
  using Number = typename S::Number;
  using Base::along;
  using Base::kRows;
  using Base::kTile;
  using Base::lse;
  using Base::p;
  using Base::tile;

  const BackwardBackwardParams<T>& second;
  T* grad_out;   // [Dv][rows]
  T* ds_tile;    // [keys][rows], over dP; dU after through_softcap
  T* ds_t_tile;  // [keys][rows], over dP'; dU' after through_softcap
  T* end_of_scratch;
  alignas(64) T lse_t[kRows];
  alignas(64) T delta[kRows];
  alignas(64) T delta_t[kRows];

  static int64_t scratch_numbers(const Problem<T>& p) {
    return Base::scratch_numbers(p) + p.value_dim * kRows + 2 * kTile;
  }

  BackwardTangentTile(const BackwardBackwardParams<T>& params, T* scratch)
      : Base(params.backward.problem, params.directions, params.backward.lse,
             params.backward.lse_rest, scratch),
        second(params) {
    grad_out = Base::end_of_scratch;
    ds_tile = grad_out + p.value_dim * kRows;
    ds_t_tile = ds_tile + kTile;
    end_of_scratch = scratch + scratch_numbers(p);
  }

  /// Whether there is a P'.
  bool weights_move() const { return this->scores_move() || along.sinks.data != nullptr; }

  QKV_ONE_COPY void load_rows() {
    Base::load_rows();
    const BackwardParams<T>& backward = second.backward;
    tile.pack_transposed(backward.grad_out, p.value_dim, T(1), grad_out);
    for (int r = 0; r < kRows; ++r) lse_t[r] = delta[r] = delta_t[r] = T(0);
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t scalar = tile.scalar(p, r);
      const T* grad = tile.row(backward.grad_out, r);
      lse_t[r] = second.lse_t[scalar];
      delta[r] = dot<T>(grad, tile.row(backward.out, r), p.value_dim);
      if (backward.grad_lse != nullptr) delta[r] -= backward.grad_lse[scalar];
      delta_t[r] = dot<T>(grad, tile.row(second.out_t, r), p.value_dim);
    }
  }

  QKV_ONE_COPY TileState load_block(int64_t first_key, int keys) {
    const TileState state = Base::load_block(first_key, keys);
    if (state == TileState::kEmpty) return state;
    const int64_t size = static_cast<int64_t>(keys) * kRows;
    if (weights_move()) {
      this->product(keys, p.value_dim, p.value, first_key, grad_out, ds_tile);
    } else {
      set_to_zero(ds_tile, size);
    }
    if (along.value.data != nullptr) {
      this->product(keys, p.value_dim, along.value, first_key, grad_out, ds_t_tile);
    } else {
      set_to_zero(ds_t_tile, size);
    }
    const auto derive = [&](int at, int v, auto kept, auto dropped, Number weight, Number score_t)
        __attribute__((always_inline)) {
      const int r = v * S::kWidth;
      const auto dp = dropped(S::load(ds_tile + at));
      const auto dp_t = dropped(S::load(ds_t_tile + at));
      const auto ds = weight * (dp - S::load(delta + r));
      const auto growth = score_t - S::load(lse_t + r);  // P' / P
      const auto ds_t = S::fma(growth, ds, weight * (dp_t - S::load(delta_t + r)));
      S::store(this->p_tile + at, kept(dropped(weight * growth)));
      S::store(ds_tile + at, kept(ds));
      S::store(ds_t_tile + at, kept(ds_t));
    };
    this->for_each_pair(state, keys, derive);
    return state;
  }

  /// sums[r] -= dS' · |p - j|, the row's share of the derivative of its slope's gradient.
  void add_slope_gradient(int64_t first_key, int keys, T* sums) const {
    this->alibi.for_each_distance(
        first_key, keys, [&](int k, int v, Number distance) __attribute__((always_inline)) {
          T* sum = sums + v * S::kWidth;
          const auto ds_t = S::load(ds_t_tile + k * kRows + v * S::kWidth);
          S::store(sum, S::fma(S::zero() - ds_t, distance, S::load(sum)));
        });
  }

  /// dS and dS' become dU and dU'. A pair that is not kept keeps its 0.
  void through_softcap(TileState state, int keys) {
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < this->vectors(); ++v) {
        const int at = k * kRows + v * S::kWidth;
        const auto slope = S::load(this->cap_slopes + at);
        const auto slope_t = S::load(this->cap_slopes_t + at);
        const auto ds = S::load(ds_tile + at);
        auto du = slope * ds;
        auto du_t = S::fma(slope, S::load(ds_t_tile + at), slope_t * ds);
        if (state == TileState::kPartial) {
          const auto kept = S::bit_of_bytes(this->mask.bits + k / 8 * kRows + v * S::kWidth, k % 8);
          du = S::select(kept, du, S::zero());
          du_t = S::select(kept, du_t, S::zero());
        }
        S::store(ds_tile + at, du);
        S::store(ds_t_tile + at, du_t);
      }
    }
  }
};

/// As partial_grad_query_size, for tiles of one width.
template <class T>
inline int64_t partial_grad_query_t_size(const BackwardBackwardParams<T>& params) {
  const Problem<T>& p = params.backward.problem;
  return params.backward.splits * TangentTile<T>::tiles_of_head(p) * p.head_dim *
         TangentTile<T>::kRows;
}

template <class T>
inline int64_t backward_backward_scratch_bytes(const BackwardBackwardParams<T>& params) {
  using Work = BackwardTangentTile<T>;
  const Problem<T>& p = params.backward.problem;
  const int64_t splits = params.backward.splits;
  const int64_t key_width = round_up_to_vector<T>(p.head_dim);
  const int64_t value_width = round_up_to_vector<T>(p.value_dim);
  const int64_t longest_split = (backward_blocks(p) + splits - 1) / splits * kBackwardBlockKeys;
  const int64_t numbers = Work::scratch_numbers(p) +
                          (p.head_dim + 2 * key_width + value_width) * Work::kRows +
                          (key_width + value_width) * longest_split;
  return numbers * static_cast<int64_t>(sizeof(T));
}

/// One range of keys of one key/value head. Units count the splits of first_head, then of the next
/// head; partial_grad_query begins with first_head.
template <class T>
inline void attention_backward_backward(const BackwardBackwardParams<T>& params, int64_t first_head,
                                        int64_t unit, void* scratch) {
  using Work = BackwardTangentTile<T>;
  constexpr int kRows = Work::kRows;
  const BackwardParams<T>& backward = params.backward;
  const Problem<T>& p = backward.problem;
  const Directions<T>& along = params.directions;
  const int64_t head = first_head + unit / backward.splits;
  const int64_t split = unit % backward.splits;
  const int64_t batch = head / p.kv_heads, kv_head = head % p.kv_heads;
  const int64_t group = p.query_heads / p.kv_heads;
  const int64_t tiles = Work::tiles_of_head(p);
  const KeyRange keys = keys_of_split(backward, split);
  const int64_t key_width = round_up_to_vector<T>(p.head_dim);
  const int64_t value_width = round_up_to_vector<T>(p.value_dim);
  const bool need_query = backward.grad_query.data != nullptr;
  const bool need_key = backward.grad_key.data != nullptr;
  const bool query_moves = along.query.data != nullptr;

  Work work(params, static_cast<T*>(scratch));
  const bool need_value = backward.grad_value.data != nullptr && work.weights_move();
  T* query_rows = work.end_of_scratch;                      // [rows][D], scaled
  T* query_t_rows = query_rows + kRows * key_width;         // [rows][D], scaled
  T* grad_out_rows = query_t_rows + kRows * key_width;      // [rows][Dv]
  T* own_grad_query = grad_out_rows + kRows * value_width;  // [D][rows]
  T* grad_key = own_grad_query + p.head_dim * kRows;        // [keys of the split][D]
  T* grad_value = grad_key + (keys.end - keys.begin) * key_width;
  set_to_zero(grad_key, (keys.end - keys.begin) * (key_width + value_width));
  if (!query_moves) set_to_zero(query_t_rows, kRows * key_width);
  T scale_of_row[kRows];
  for (auto& s : scale_of_row) s = p.scale;
  alignas(64) T slope_gradient[kRows];

  for (int64_t t = 0; t < tiles; ++t) {
    work.tile = RowTile<kRows>::make(p, batch, kv_head, kv_head * group, group, t * kRows);
    const RowTile<kRows>& tile = work.tile;
    T* grad_query = backward.splits == 1
                        ? own_grad_query
                        : backward.partial_grad_query + (unit * tiles + t) * p.head_dim * kRows;
    if (need_query) set_to_zero(grad_query, p.head_dim * kRows);

    const KeyRange range = work.keys_of_rows().intersection(keys);
    Lazily rows_finite([&] {
      return all_finite<T>(query_rows, key_width, 2 * kRows, key_width) &&
             all_finite<T>(grad_out_rows, value_width, kRows, value_width);
    });
    if (!range.empty()) {
      work.load_rows();
      tile.pack(p.query, p.head_dim, p.scale, query_rows, key_width);
      if (query_moves) tile.pack(along.query, p.head_dim, p.scale, query_t_rows, key_width);
      tile.pack(backward.grad_out, p.value_dim, T(1), grad_out_rows, value_width);
    }

    set_to_zero(slope_gradient, kRows);
    for (int64_t n = first_of_eight(range.begin); n < range.end; n += kBackwardBlockKeys) {
      const int block =
          range.end - n < kBackwardBlockKeys ? static_cast<int>(range.end - n) : kBackwardBlockKeys;
      const TileState state = work.load_block(n, block);
      if (state == TileState::kEmpty) continue;
      if (backward.grad_mask.data != nullptr) {
        add_to_mask(work.ds_t_tile, tile, backward.grad_mask, n, block);
      }
      if (backward.slope_gradient_of_rows != nullptr) {
        work.add_slope_gradient(n, block, slope_gradient);
      }
      if (p.softcap != T(0)) work.through_softcap(state, block);

      // c[keys][width] += aᵀ rows
      const auto add_rows = [&](const T* a, const T* rows, int64_t width, T* c) {
        if (state == TileState::kPartial && !rows_finite()) {
          multiply_add_kept_rows<T, kRows>(block, a, rows, work.mask.bits, c, width);
        } else {
          multiply_add_rows<T, kRows>(block, tile.rows, a, rows, width, c);
        }
      };
      T* block_grad_key = grad_key + (n - keys.begin) * key_width;
      T* block_grad_value = grad_value + (n - keys.begin) * value_width;
      if (need_value) add_rows(work.p_tile, grad_out_rows, value_width, block_grad_value);
      if (need_key) add_rows(work.ds_t_tile, query_rows, key_width, block_grad_key);
      if (need_key && query_moves) {
        add_rows(work.ds_tile, query_t_rows, key_width, block_grad_key);
      }

      if (!need_query) continue;
      work.add_product(state, block, p.head_dim, p.key, n, work.ds_t_tile, grad_query);
      if (along.key.data != nullptr) {
        work.add_product(state, block, p.head_dim, along.key, n, work.ds_tile, grad_query);
      }
    }
    if (backward.slope_gradient_of_rows != nullptr) {
      T* of_rows = backward.slope_gradient_of_rows + split * p.batch * p.query_heads * p.queries;
      for (int r = 0; r < tile.rows; ++r) of_rows[tile.scalar(p, r)] = slope_gradient[r];
    }
    if (need_query && backward.splits == 1) {
      tile.unpack_transposed(grad_query, p.head_dim, scale_of_row, backward.grad_query);
    }
  }

  const auto write = [&](const T* from, int64_t width, int64_t columns, const Operand<T>& to) {
    if (to.data == nullptr) return;
    write_rows(from, width, keys.end - keys.begin, columns,
               work.tile.keys_of_head(to) + keys.begin * to.row_stride, to);
  };
  write(grad_key, key_width, p.head_dim, backward.grad_key);
  write(grad_value, value_width, p.value_dim, backward.grad_value);
}

/// dQ' of one tile of rows: the parts of all splits, added in order.
template <class T>
inline void sum_grad_query_t(const BackwardBackwardParams<T>& params, int64_t first_head,
                             int64_t unit, void* scratch) {
  sum_splits<T, kBackwardVectors>(params.backward, first_head, unit, scratch);
}

template <class T>
inline int64_t mask_gradient_t_scratch_bytes(const BackwardBackwardParams<T>& params) {
  return BackwardTangentTile<T>::scratch_numbers(params.backward.problem) *
         static_cast<int64_t>(sizeof(T));
}

/// dmask' = dS', summed as dmask is.
template <class T>
inline void mask_gradient_t(const BackwardBackwardParams<T>& params, int64_t unit, void* scratch) {
  BackwardTangentTile<T> work(params, static_cast<T*>(scratch));
  sum_over_mask(work.p, params.backward.grad_mask, unit, work, work.ds_t_tile);
}

/// dsink' = - sum over i of W ∘ ((sink' - lse') ∘ delta + delta'), of one head as in head_gradient.
template <class T>
inline void sink_gradient_t(const BackwardBackwardParams<T>& params, double* grad_sinks,
                            int64_t unit) {
  const BackwardParams<T>& backward = params.backward;
  const Problem<T>& p = backward.problem;
  const HeadRows<T> head(p, unit);
  const T sink = head.number(p.sinks);
  const T sink_t =
      params.directions.sinks.data == nullptr ? T(0) : head.number(params.directions.sinks);
  double sum = 0.0;
  for (int64_t i = 0; i < p.queries; ++i) {
    const int64_t scalar = unit * p.queries + i;
    if (backward.lse[scalar] == -static_cast<T>(__builtin_inff())) continue;
    const T weight = sink_weight(sink, backward.lse[scalar], backward.lse_rest[scalar]);
    T delta = head.dot_with_output(backward.grad_out, backward.out, i);
    if (backward.grad_lse != nullptr) delta -= backward.grad_lse[scalar];
    const T delta_t = head.dot_with_output(backward.grad_out, params.out_t, i);
    const T moved = (sink_t - params.lse_t[scalar]) * delta + delta_t;
    sum -= static_cast<double>(weight) * static_cast<double>(moved);
  }
  grad_sinks[unit] = sum;
}

}  // namespace qkv::kernels::QKV_ISA
