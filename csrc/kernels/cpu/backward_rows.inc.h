#pragma once

#include "kernels/band.h"
#include "kernels/cpu/backward_splits.inc.h"
#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// What becomes of the products S = scale · K Qᵀ and dP = V dOᵀ of a tile of rows in the backward,
// whatever they are multiplied in. R is what dropout multiplies the weights with.
//
//     S  = softcap(S) + mask - ALiBi     P  = exp(S - lse)
//     dP = R ∘ dP                        dS = P ∘ (dP - delta)
//     delta_i = <dO_i, O_i> - dLSE_i
//
//              rows (lanes) ->
//     P  keys [ ............ ]   over S, times R
//     dS keys [ ............ ]   over dP

namespace qkv::kernels::QKV_ISA {

template <class T, int kVectors>
struct BackwardRows {
  using S = Simd<T>;
  static constexpr int kRows = kVectors * S::kWidth;

  const BackwardParams<T>& params;
  const Problem<T>& p;
  RowTile<kRows> tile;
  MaskTile<T, kRows> mask;
  uint8_t* stays;  // R != 0
  AlibiTile<T, kVectors> alibi;
  alignas(64) T lse[kRows];
  alignas(64) T lse_rest[kRows];
  alignas(64) T delta[kRows];

  explicit BackwardRows(const BackwardParams<T>& backward)
      : params(backward), p(backward.problem) {}

  KeyRange keys_of_rows() const {
    return keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys);
  }

  KeyRange keys_of_all_rows() const {
    return keys_of_all(p.band, tile.first_query(), tile.last_query(), p.keys);
  }

  bool sees(KeyRange keys) const { return !keys_of_rows().intersection(keys).empty(); }

  /// dot_of_row(r) is <dO_r, O_r>.
  template <class Dot>
  void load_numbers(Dot dot_of_row) {
    alibi.load(p, tile);
    for (int r = 0; r < kRows; ++r) {
      // A lane without a row gets lse = inf, hence P = 0.
      lse[r] = static_cast<T>(__builtin_inff());
      lse_rest[r] = T(0);
      delta[r] = T(0);
    }
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t scalar = tile.scalar(p, r);
      const T sum = dot_of_row(r);
      // Nor does one that keeps nothing, or only scores that overflowed, whose lse is -inf.
      if (params.lse[scalar] != -static_cast<T>(__builtin_inff())) lse[r] = params.lse[scalar];
      lse_rest[r] = params.lse_rest[scalar];
      delta[r] = params.grad_lse == nullptr ? sum : sum - params.grad_lse[scalar];
    }
  }

  TileState load_pairs(int64_t first_key, int count) {
    const TileState state = mask.load(p, tile, first_key, count);
    if (state == TileState::kEmpty) return state;
    if (p.dropout.threshold != 0) load_dropout<kRows>(p.dropout, tile, first_key, count, stays);
    return state;
  }

  /// In the place of dP, what came for the weights: of `keys` keys and kCount vectors of rows.
  template <int kCount>
  QKV_ONE_COPY void load_grad_weights(int64_t first_key, int keys, int first_vector,
                                      T* grads) const {
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      using Stored = decltype(stored);
      const auto rows = tile.template stored_rows_in<Stored>(params.grad_weights);
      for (int v = 0; v < kCount; ++v) {
        const Stored* from[S::kWidth];
        for (int l = 0; l < S::kWidth; ++l) {
          const int r = (first_vector + v) * S::kWidth + l;
          from[l] = r < tile.rows ? rows[r] + first_key : nullptr;
        }
        transpose_rows<T, Stored>(from, keys, T(1), grads + v * S::kWidth, kRows);
      }
    });
  }

  /// kCount vectors of rows from first_vector on and `keys` keys, `offset` after the first of those
  /// whose pairs were loaded, first_key. scores: S -> R ∘ P, grads: V dOᵀ -> dS; caps takes the
  /// derivative of the softcap.
  template <int kCount, class Exp = ExpOfNonpositive<T>>
  void softmax_backward(int64_t first_key, int offset, int keys, int first_vector, bool partial,
                        T* scores, T* grads, T* caps) const {
    const ScoreRows<T, kCount, kRows> rows(p, mask, alibi, first_key + offset, offset, first_vector,
                                           TileState::kFull);
    rows.cap(keys, scores, caps);
    rows.bias(keys, scores);
    const auto weigh = [&](auto masked, auto drops) {
      for (int v = 0; v < kCount; ++v) {
        const RowNumbers numbers = numbers_of(first_vector + v);
        for (int k = 0; k < keys; ++k) {
          T* s = scores + k * kRows + v * S::kWidth;
          T* g = grads + k * kRows + v * S::kWidth;
          const auto pair = gradients_of<masked() != 0, drops() != 0, Exp>(
              offset + k, first_vector + v, numbers, S::load(s) - numbers.lse, S::load(g));
          S::store(s, pair.weight);
          S::store(g, pair.gradient);
        }
      }
    };
    with_constant(partial, [&](auto masked) {
      with_constant(p.dropout.threshold != 0, [&](auto drops) { weigh(masked, drops); });
    });
  }

  /// scores: S -> P, also of pairs that are not kept. For the keys and vectors of softmax_backward;
  /// not with a softcap.
  template <int kCount, class Exp>
  QKV_ONE_COPY void to_weights(int64_t first_key, int offset, int keys, int first_vector,
                               T* scores) const {
    const ScoreRows<T, kCount, kRows> rows(p, mask, alibi, first_key + offset, offset, first_vector,
                                           TileState::kFull);
    rows.bias(keys, scores);
    for (int v = 0; v < kCount; ++v) {
      const RowNumbers numbers = numbers_of(first_vector + v);
      T* s = scores + v * S::kWidth;
      for (int k = 0; k < keys; ++k, s += kRows) {
        typename S::Number x[1] = {S::load(s) - numbers.lse - numbers.lse_rest};
        to_probabilities<Exp>(x);
        S::store(s, x[0]);
      }
    }
  }

  /// dots[row] += <dW, P> for the pairs that are kept: of others both may be anything. Pieces of a
  /// block go on with the sums of those before, so that these do not depend on how it is cut.
  template <int kCount>
  QKV_ONE_COPY void add_dots(int offset, int keys, int first_vector, bool partial, const T* weights,
                             const T* grads, T* dots) const {
    with_constant(partial, [&](auto masked) {
      for (int v = 0; v < kCount; ++v) {
        const int at = v * S::kWidth;
        T* const to = dots + first_vector * S::kWidth + at;
        auto sum = S::load(to);
        for (int k = 0; k < keys; ++k) {
          auto weight = S::load(weights + k * kRows + at), grad = S::load(grads + k * kRows + at);
          if constexpr (masked() != 0) {
            const auto kept_k = kept(offset + k, first_vector + v);
            weight = S::select(kept_k, weight, S::zero());
            grad = S::select(kept_k, grad, S::zero());
          }
          sum = S::fma(weight, grad, sum);
        }
        S::store(to, sum);
      }
    });
  }

  /// weights: P -> dS, from dW.
  template <int kCount>
  QKV_ONE_COPY void weights_backward(int offset, int keys, int first_vector, bool partial,
                                     const T* grads, T* weights) const {
    with_constant(partial, [&](auto masked) {
      for (int v = 0; v < kCount; ++v) {
        const auto delta_v = S::load(delta + (first_vector + v) * S::kWidth);
        for (int k = 0; k < keys; ++k) {
          const int x = k * kRows + v * S::kWidth;
          auto ds = S::load(weights + x) * (S::load(grads + x) - delta_v);
          if constexpr (masked() != 0) {
            ds = S::select(kept(offset + k, first_vector + v), ds, S::zero());
          }
          S::store(weights + x, ds);
        }
      }
    });
  }

  /// What a vector of rows subtracts.
  struct RowNumbers {
    typename S::Number lse, lse_rest, delta;
  };
  QKV_INLINE RowNumbers numbers_of(int vector) const {
    const int row = vector * S::kWidth;
    return {S::load(lse + row), S::load(lse_rest + row), S::load(delta + row)};
  }

  /// P where S - lse was.
  template <class Exp, int kCount>
  static QKV_INLINE void to_probabilities(typename S::Number (&x)[kCount]) {
    // Rounding can leave a score of 1e8 above its lse; without the clamp P would overflow.
#pragma GCC unroll 2
    for (auto& above_lse : x) above_lse = S::minimum(S::zero(), above_lse);
    Exp::replace(x);
  }

  struct Pairs {
    typename S::Number weight, gradient;  // R ∘ P, dS
  };

  /// Of key `k` of those whose pairs were loaded, from S - lse and V dOᵀ. Pairs that are not kept
  /// get 0 by selection, as their S and dP may be NaN.
  template <bool kMasked, bool kDropout, class Exp = ExpOfNonpositive<T>>
  QKV_INLINE Pairs gradients_of(int k, int vector, const RowNumbers& numbers,
                                typename S::Number above_lse, typename S::Number dp) const {
    typename S::Number x[1] = {above_lse - numbers.lse_rest};
    to_probabilities<Exp>(x);
    const auto probability = x[0];
    auto used = probability;
    if constexpr (kDropout) {
      const auto scale = S::set(dropout_scale<T>(p.dropout));
      const auto stays_k = S::bit_of_bytes(stays + k / 8 * kRows + vector * S::kWidth, k % 8);
      dp = S::select(stays_k, dp * scale, S::zero());
      used = S::select(stays_k, used * scale, S::zero());
    }
    auto ds = probability * (dp - numbers.delta);
    if constexpr (kMasked) {
      const auto kept_k = kept(k, vector);
      used = S::select(kept_k, used, S::zero());
      ds = S::select(kept_k, ds, S::zero());
    }
    return {used, ds};
  }

  /// sums[r] -= dS · |p - j|, the row's share of the gradient of its slope, for kCount vectors of
  /// rows. grads begin with the first of them, sums with the first row of all.
  template <int kCount = kVectors>
  void add_slope_gradient(int64_t first_key, int keys, const T* grads, T* sums,
                          int first_vector = 0) const {
    alibi.template for_each_distance<kCount>(
        first_key, keys,
        [&](int k, int v, typename S::Number distance) __attribute__((always_inline)) {
          T* sum = sums + v * S::kWidth;
          const auto ds = S::load(grads + k * kRows + (v - first_vector) * S::kWidth);
          S::store(sum, S::fma(S::zero() - ds, distance, S::load(sum)));
        },
        first_vector);
  }

  /// dS becomes the gradient of scale · Q Kᵀ. A pair that is not kept keeps its 0. For the keys and
  /// vectors of softmax_backward.
  template <int kCount>
  void through_softcap(int offset, int keys, int first_vector, bool partial, const T* caps,
                       T* grads) const {
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < kCount; ++v) {
        T* g = grads + k * kRows + v * S::kWidth;
        auto ds = S::load(g) * S::load(caps + k * kRows + v * S::kWidth);
        if (partial) ds = S::select(kept(offset + k, first_vector + v), ds, S::zero());
        S::store(g, ds);
      }
    }
  }

 private:
  typename S::Mask kept(int k, int v) const {
    return S::bit_of_bytes(mask.bits + k / 8 * kRows + v * S::kWidth, k % 8);
  }
};

}  // namespace qkv::kernels::QKV_ISA
