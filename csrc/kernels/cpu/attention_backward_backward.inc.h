#pragma once

#include "kernels/cpu/attention_jvp.inc.h"
#include "kernels/cpu/head_gradient.inc.h"
#include "kernels/cpu/isa.h"
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

template <class T>
inline TangentMatrices<T> matrices_of(const BackwardBackwardParams<T>& params) {
  return {params.backward.problem, params.directions, &params.backward.grad_out};
}

/// dS, dS' and R ∘ P' of one tile of rows and one block of keys.
template <class Products>
struct BackwardTangentTile : TangentTile<Products> {
  using Base = TangentTile<Products>;
  using Base::along;
  using Base::kRows;
  using Base::kTile;
  using Base::lse;
  using Base::p;
  using Base::products;
  using Base::tile;
  using typename Base::Number;
  using typename Base::S;
  using typename Base::T;

  const BackwardBackwardParams<T>& second;
  T* ds_tile;    // [keys][rows], over dP; dU after through_softcap
  T* ds_t_tile;  // [keys][rows], over dP'; dU' after through_softcap
  T* end_of_scratch;
  alignas(64) T lse_t[kRows];
  alignas(64) T delta[kRows];
  alignas(64) T delta_t[kRows];

  static int64_t scratch_numbers(const BackwardBackwardParams<T>& params, KeyRange keys) {
    return Base::scratch_numbers(matrices_of(params), keys) + 2 * kTile;
  }

  BackwardTangentTile(const BackwardBackwardParams<T>& params, KeyRange keys, T* scratch)
      : Base(matrices_of(params), params.directions, params.backward.lse, params.backward.lse_rest,
             keys, /*prepared=*/nullptr, scratch),
        second(params) {
    ds_tile = Base::end_of_scratch;
    ds_t_tile = ds_tile + kTile;
    end_of_scratch = ds_t_tile + kTile;
  }

  /// Whether there is a P'.
  bool weights_move() const { return this->scores_move() || along.sinks.data != nullptr; }

  QKV_ONE_COPY void load_rows() {
    Base::load_rows();
    const BackwardParams<T>& backward = second.backward;
    for (int r = 0; r < kRows; ++r) lse_t[r] = delta[r] = delta_t[r] = T(0);
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      for (int r = 0; r < tile.rows; ++r) {
        const int64_t scalar = tile.scalar(p, r);
        const auto* grad = tile.template stored_row<decltype(stored)>(backward.grad_out, r);
        lse_t[r] = second.lse_t[scalar];
        delta[r] = dot<T>(grad, tile.row(backward.out, r), p.value_dim);
        if (backward.grad_lse != nullptr) delta[r] -= backward.grad_lse[scalar];
        delta_t[r] = dot<T>(grad, tile.row(second.out_t, r), p.value_dim);
      }
    });
  }

  QKV_ONE_COPY TileState load_block(int64_t first_key, int keys) {
    const TileState state = Base::load_block(first_key, keys);
    if (state == TileState::kEmpty) return state;
    const int64_t size = static_cast<int64_t>(keys) * kRows;
    if (weights_move()) {
      products.multiply(kValue, kGradOut, ds_tile, /*add=*/false);
    } else {
      set_to_zero(ds_tile, size);
    }
    if (along.value.data != nullptr) {
      products.multiply(kValueT, kGradOut, ds_t_tile, /*add=*/false);
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

/// Numbers of dQ'ᵀ of one tile of rows.
template <class Products, class T>
inline int64_t grad_query_t_size(const Problem<T>& p) {
  return Products::sum_rows(p.head_dim) * Products::kRows;
}

/// As partial_grad_query_size, for tiles of one width.
template <class Products, class T>
inline int64_t partial_grad_query_t_size(const BackwardBackwardParams<T>& params) {
  const Problem<T>& p = params.backward.problem;
  return params.backward.splits * TangentTile<Products>::tiles_of_head(p) *
         grad_query_t_size<Products>(p);
}

template <class Products, class T>
inline int64_t backward_backward_scratch_bytes(const BackwardBackwardParams<T>& params) {
  const Problem<T>& p = params.backward.problem;
  const int64_t splits = params.backward.splits;
  const int64_t widths = round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim);
  const int64_t longest_split = (backward_blocks(p) + splits - 1) / splits * kBackwardBlockKeys;
  const int64_t numbers =
      BackwardTangentTile<Products>::scratch_numbers(params, {0, longest_split}) +
      grad_query_t_size<Products>(p) + widths * longest_split;
  return numbers * static_cast<int64_t>(sizeof(T));
}

/// One range of keys of one key/value head. Units count the splits of first_head, then of the next
/// head; partial_grad_query begins with first_head.
template <class Products, class T>
inline void attention_backward_backward(const BackwardBackwardParams<T>& params, int64_t first_head,
                                        int64_t unit, void* scratch) {
  using S = Simd<T>;
  using Work = BackwardTangentTile<Products>;
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

  Work work(params, keys, static_cast<T*>(scratch));
  Products& products = work.products;
  const bool need_value = backward.grad_value.data != nullptr && work.weights_move();
  const int64_t grad_query_size = grad_query_t_size<Products>(p);
  const int64_t of_keys =
      (keys.end - keys.begin + kBackwardBlockKeys - 1) / kBackwardBlockKeys * kBackwardBlockKeys;
  T* own_grad_query = work.end_of_scratch;         // [D][rows]
  T* grad_key = own_grad_query + grad_query_size;  // [keys of the split, whole blocks][D]
  T* grad_value = grad_key + of_keys * key_width;
  set_to_zero(grad_key, of_keys * (key_width + value_width));
  T scale_of_row[kRows];
  for (auto& s : scale_of_row) s = p.scale;
  alignas(64) T slope_gradient[kRows];

  for (int64_t t = 0; t < tiles; ++t) {
    work.tile = RowTile<kRows>::make(p, batch, kv_head, kv_head * group, group, t * kRows);
    const RowTile<kRows>& tile = work.tile;
    T* grad_query = backward.splits == 1
                        ? own_grad_query
                        : backward.partial_grad_query + (unit * tiles + t) * grad_query_size;
    if (need_query) set_to_zero(grad_query, grad_query_size);

    const KeyRange range = work.keys_of_rows().intersection(keys);
    if (!range.empty()) work.load_rows();
    set_to_zero(slope_gradient, kRows);
    for (int64_t n = Products::first_key(range.begin); !range.empty() && n < range.end;
         n += Work::kBlockKeys) {
      const int block =
          range.end - n < Work::kBlockKeys ? static_cast<int>(range.end - n) : Work::kBlockKeys;
      const TileState state = work.load_block(n, block);
      if (state == TileState::kEmpty) continue;
      if (backward.grad_mask.data != nullptr) {
        add_to_mask(work.ds_t_tile, tile, backward.grad_mask, n, block);
      }
      if (backward.slope_gradient_of_rows != nullptr) {
        work.add_slope_gradient(n, block, slope_gradient);
      }
      if (p.softcap != T(0)) work.through_softcap(state, block);

      T* block_grad_key = grad_key + (n - keys.begin) * key_width;
      T* block_grad_value = grad_value + (n - keys.begin) * value_width;
      if (need_value) products.add_to_keys(kGradOut, work.p_tile, block_grad_value);
      if (need_key) products.add_to_keys(kQuery, work.ds_t_tile, block_grad_key);
      if (need_key && query_moves) products.add_to_keys(kQueryT, work.ds_tile, block_grad_key);
      if (!need_query) continue;
      products.add_to_rows(kKey, work.ds_t_tile, grad_query);
      if (along.key.data != nullptr) products.add_to_rows(kKeyT, work.ds_tile, grad_query);
    }
    if (backward.slope_gradient_of_rows != nullptr) {
      T* of_rows = backward.slope_gradient_of_rows + split * p.batch * p.query_heads * p.queries;
      for (int r = 0; r < tile.rows; ++r) of_rows[tile.scalar(p, r)] = slope_gradient[r];
    }
    if (need_query && backward.splits == 1) {
      tile.unpack_transposed(grad_query, p.head_dim, scale_of_row, backward.grad_query,
                             p.key_value_storage);
    }
  }

  const auto write = [&](const T* from, int64_t width, int64_t columns, const Operand<T>& to) {
    if (to.data == nullptr) return;
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      auto* head_rows = work.tile.template stored_keys_of_head<decltype(stored)>(to);
      write_rows(from, width, keys.end - keys.begin, columns,
                 head_rows + keys.begin * to.row_stride, to);
    });
  };
  const auto scale = S::set(p.scale);
  for (int64_t x = 0; x < of_keys * key_width; x += S::kWidth) {
    S::store(grad_key + x, S::load(grad_key + x) * scale);
  }
  write(grad_key, key_width, p.head_dim, backward.grad_key);
  write(grad_value, value_width, p.value_dim, backward.grad_value);
}

/// dQ' of one tile of rows: the parts of all splits, added in order.
template <class Products, class T>
inline void sum_grad_query_t(const BackwardBackwardParams<T>& params, int64_t first_head,
                             int64_t unit, void* scratch) {
  sum_splits<T, Products::kRows / Simd<T>::kWidth>(
      params.backward, first_head, unit, grad_query_t_size<Products>(params.backward.problem),
      scratch);
}

template <class Products, class T>
inline int64_t mask_gradient_t_scratch_bytes(const BackwardBackwardParams<T>& params) {
  using Work = BackwardTangentTile<Products>;
  return Work::scratch_numbers(params, /*keys=*/{0, 0}) * static_cast<int64_t>(sizeof(T));
}

/// dmask' = dS', summed as dmask is.
template <class Products, class T>
inline void mask_gradient_t(const BackwardBackwardParams<T>& params, int64_t unit, void* scratch) {
  BackwardTangentTile<Products> work(params, /*keys=*/{0, 0}, static_cast<T*>(scratch));
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
    T delta{}, delta_t{};
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      using Stored = decltype(stored);
      delta = head.template dot_with_exact_output<Stored>(backward.grad_out, backward.out, i);
      delta_t = head.template dot_with_exact_output<Stored>(backward.grad_out, params.out_t, i);
    });
    if (backward.grad_lse != nullptr) delta -= backward.grad_lse[scalar];
    const T moved = (sink_t - params.lse_t[scalar]) * delta + delta_t;
    sum -= static_cast<double>(weight) * static_cast<double>(moved);
  }
  grad_sinks[unit] = sum;
}

template <class Products, class T = typename Products::Number>
constexpr TangentKernels<T> make_tangent_kernels() {
  return {jvp_units<Products, T>,
          jvp_prepared_bytes<Products, T>,
          prepare_jvp<Products, T>,
          jvp_scratch_bytes<Products, T>,
          attention_jvp<Products, T>,
          backward_backward_scratch_bytes<Products, T>,
          partial_grad_query_t_size<Products, T>,
          attention_backward_backward<Products, T>,
          sum_grad_query_t<Products, T>,
          Products::kOwnsMaskGradient ? mask_gradient_t_scratch_bytes<Products, T> : nullptr,
          Products::kOwnsMaskGradient ? mask_gradient_t<Products, T> : nullptr};
}

}  // namespace qkv::kernels::QKV_ISA
