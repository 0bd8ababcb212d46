#pragma once

#include "kernels/cpu/tangent_tile.inc.h"

// dS, dS' and P' of one tile of rows and one block of keys: what derivatives of gradients along
// directions are made of (a prime is a derivative along them; delta is <dO, O> - dLSE, R what
// dropout multiplies the weights with).
//
//     dP  = R ∘ (dO Vᵀ)              dP' = R ∘ (dO V'ᵀ)
//     dS  = P ∘ (dP - delta)         dS' = (S' - lse') ∘ dS + P ∘ (dP' - delta')
//     dU  = f'(U) ∘ dS               dU' = f'(U) ∘ dS' + (f'(U))' ∘ dS
//
//                 rows (lanes) ->
//     R ∘ P'  keys [ ............ ]   over P
//     dS      keys [ ............ ]   over dP
//     dS'     keys [ ............ ]   over dP'

namespace qkv::kernels::QKV_ISA {

template <class T>
inline TangentMatrices<T> matrices_of(const BackwardBackwardParams<T>& params) {
  return {params.backward.problem, params.directions, &params.backward.grad_out};
}

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

  static int64_t scratch_numbers(const BackwardBackwardParams<T>& params) {
    return Base::scratch_numbers(matrices_of(params)) + 2 * kTile;
  }

  BackwardTangentTile(const BackwardBackwardParams<T>& params, void* prepared, T* scratch)
      : Base(matrices_of(params), params.directions, params.backward.lse, params.backward.lse_rest,
             prepared, scratch),
        second(params) {
    ds_tile = Base::end_of_scratch;
    ds_t_tile = ds_tile + kTile;
    end_of_scratch = ds_t_tile + kTile;
  }

  /// Whether there is a P'.
  bool weights_move() const { return this->scores_move() || along.sinks.data != nullptr; }

  /// Of rows whose O' and lse' are known.
  void load_rows() {
    load_operands();
    load_numbers();
  }

  /// Those that O' and lse' are made of, too.
  void load_operands() { Base::load_rows(); }

  QKV_ONE_COPY void load_numbers() {
    const BackwardParams<T>& backward = second.backward;
    for (int r = 0; r < kRows; ++r) lse_t[r] = delta[r] = delta_t[r] = T(0);
    const auto out = tile.rows_in(backward.out), out_t = tile.rows_in(second.out_t);
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      const auto grad_out = tile.template stored_rows_in<decltype(stored)>(backward.grad_out);
      for (int r = 0; r < tile.rows; ++r) {
        const int64_t scalar = tile.scalar(p, r);
        lse_t[r] = second.lse_t[scalar];
        delta[r] = dot<T>(grad_out[r], out[r], p.value_dim);
        if (backward.grad_lse != nullptr) delta[r] -= backward.grad_lse[scalar];
        delta_t[r] = dot<T>(grad_out[r], out_t[r], p.value_dim);
      }
    });
  }

  /// S and S'.
  TileState load_scores(int64_t first_key, int keys) { return Base::load_block(first_key, keys); }
  TileState reload_scores(int64_t first_key, int keys) {
    return Base::reload_block(first_key, keys);
  }

  TileState load_block(int64_t first_key, int keys) {
    const TileState loaded = Base::load_block(first_key, keys);
    if (loaded != TileState::kEmpty) derive_block</*kWeights=*/false>(keys);
    return loaded;
  }

  /// The same of a block in use that was loaded before, and whose tile of S has P since.
  TileState reload_block(int64_t first_key, int keys) {
    const TileState loaded = Base::reload_block(first_key, keys);
    if (loaded != TileState::kEmpty) derive_block</*kWeights=*/true>(keys);
    return loaded;
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
  void through_softcap(int keys) {
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < this->vectors(); ++v) {
        const int at = k * kRows + v * S::kWidth;
        const auto slope = S::load(this->cap_slopes + at);
        const auto slope_t = S::load(this->cap_slopes_t + at);
        const auto ds = S::load(ds_tile + at);
        auto du = slope * ds;
        auto du_t = S::fma(slope, S::load(ds_t_tile + at), slope_t * ds);
        if (*this->state == TileState::kPartial) {
          const auto kept = S::bit_of_bytes(this->mask.bits + k / 8 * kRows + v * S::kWidth, k % 8);
          du = S::select(kept, du, S::zero());
          du_t = S::select(kept, du_t, S::zero());
        }
        S::store(ds_tile + at, du);
        S::store(ds_t_tile + at, du_t);
      }
    }
  }

 private:
  /// As for_each_pair.
  template <bool kWeights>
  QKV_ONE_COPY void derive_block(int keys) {
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
    struct OfRows {
      Number delta, lse_t, delta_t;
    };
    const auto begin = [&](int v) __attribute__((always_inline)) {
      const int r = v * S::kWidth;
      return OfRows{S::load(delta + r), S::load(lse_t + r), S::load(delta_t + r)};
    };
    const auto derive = [&](const OfRows& rows, auto, int at, auto kept, auto dropped,
                            Number weight, Number score_t) __attribute__((always_inline)) {
      const auto dp = dropped(S::load(ds_tile + at));
      const auto dp_t = dropped(S::load(ds_t_tile + at));
      const auto ds = weight * (dp - rows.delta);
      const auto growth = score_t - rows.lse_t;  // P' / P
      const auto ds_t = S::fma(growth, ds, weight * (dp_t - rows.delta_t));
      S::store(this->p_tile + at, kept(dropped(weight * growth)));
      S::store(ds_tile + at, kept(ds));
      S::store(ds_t_tile + at, kept(ds_t));
    };
    this->template for_each_pair<kWeights>(keys, begin, derive, [](int, const OfRows&) {});
  }
};

}  // namespace qkv::kernels::QKV_ISA
