#pragma once

#include "kernels/band.h"
#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// P and dS of one tile of rows and one block of keys, recomputed from lse: the common part of the
// backward kernel and of the mask's gradient. R is what dropout multiplies the weights with.
//
//     S = softcap(scale · K Qᵀ) + mask - ALiBi     P  = exp(S - lse)
//     dP = R ∘ (V dOᵀ)                             dS = P ∘ (dP - delta)
//     delta_i = <dO_i, O_i> - dLSE_i
//
//              rows (lanes) ->
//     Qᵀ   D  [ ............ ]
//     dOᵀ Dv  [ ............ ]
//     P  keys [ ............ ]   over S, times R
//     dS keys [ ............ ]   over dP

namespace qkv::kernels::QKV_ISA {

// A tile has 6 vectors of rows: the longer it is, the less often dK and dV are loaded and stored.
// Few rows take a tile of 1, 2 or 3.
constexpr int kBackwardVectors = 6;
constexpr int kBackwardBlockKeys = 96;

template <class T>
constexpr int64_t round_up_to_vector(int64_t x) {
  return (x + Simd<T>::kWidth - 1) / Simd<T>::kWidth * Simd<T>::kWidth;
}

/// What one tile of rows and one block of keys need, in both backward kernels.
template <class T, int kVectors>
struct BackwardTile {
  using S = Simd<T>;
  static constexpr int kRows = kVectors * S::kWidth;
  // The products are done in pieces of at most 3 vectors, which is what registers hold. Vectors
  // without a row are left out; and where the edge of the band runs through a block, so are the
  // keys that no row of a piece sees.
  static constexpr int kPieceVectors = kVectors > 3 ? kVectors / 2 : kVectors;
  static constexpr int kPieces = kVectors / kPieceVectors;
  static constexpr int kPiece = kPieceVectors * S::kWidth;

  const BackwardParams<T>& params;
  const Problem<T>& p;
  RowTile<kRows> tile;
  T* query_t;     // [D][rows]
  T* grad_out_t;  // [Dv][rows]
  T* p_tile;      // [keys][rows], R ∘ P
  T* ds_tile;     // [keys][rows]
  T* cap_tile;    // [keys][rows], the derivative of the softcap
  MaskTile<T, kRows> mask;
  uint8_t* stays;  // R != 0
  AlibiTile<T, kVectors> alibi;
  T* end_of_scratch;
  bool whole;              // nothing is left out: all of P and dS is written
  KeyRange keys[kPieces];  // of the block, that the pieces have taken
  alignas(64) T lse[kRows];
  alignas(64) T lse_rest[kRows];
  alignas(64) T delta[kRows];

  static int64_t scratch_numbers(const Problem<T>& p) {
    const int64_t tiles = p.softcap != T(0) ? 4 : 3;
    return (p.head_dim + p.value_dim + tiles * kBackwardBlockKeys + kBackwardBlockKeys / 8) * kRows;
  }

  BackwardTile(const BackwardParams<T>& backward, T* scratch, bool whole_tile = true)
      : params(backward), p(backward.problem), whole(whole_tile) {
    query_t = scratch;
    grad_out_t = query_t + p.head_dim * kRows;
    p_tile = grad_out_t + p.value_dim * kRows;
    ds_tile = p_tile + kBackwardBlockKeys * kRows;
    mask.bias = ds_tile + kBackwardBlockKeys * kRows;
    cap_tile = mask.bias + kBackwardBlockKeys * kRows;
    T* end_of_tiles = p.softcap != T(0) ? cap_tile + kBackwardBlockKeys * kRows : cap_tile;
    mask.bits = reinterpret_cast<uint8_t*>(end_of_tiles);
    stays = mask.bits + kBackwardBlockKeys / 8 * kRows;
    end_of_scratch = scratch + scratch_numbers(p);
  }

  KeyRange keys_of_rows() const {
    return keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys);
  }

  void load_rows() {
    alibi.load(p, tile);
    tile.pack_transposed(p.query, p.head_dim, p.scale, query_t);
    tile.pack_transposed(params.grad_out, p.value_dim, T(1), grad_out_t);
    for (int r = 0; r < kRows; ++r) {
      // A lane without a row gets lse = inf, hence P = 0.
      lse[r] = static_cast<T>(__builtin_inff());
      lse_rest[r] = T(0);
      delta[r] = T(0);
    }
    for (int r = 0; r < tile.rows; ++r) {
      const T* grad_out = tile.row(params.grad_out, r);
      const T* out = tile.row(params.out, r);
      const int64_t scalar = tile.scalar(p, r);
      const T sum = dot<T>(grad_out, out, p.value_dim);
      // Nor does one that keeps nothing, or only scores that overflowed, whose lse is -inf.
      if (params.lse[scalar] != -static_cast<T>(__builtin_inff())) lse[r] = params.lse[scalar];
      lse_rest[r] = params.lse_rest[scalar];
      delta[r] = params.grad_lse == nullptr ? sum : sum - params.grad_lse[scalar];
    }
  }

  /// P and dS of the keys first_key .. first_key + count.
  TileState load_block(int64_t first_key, int count) {
    const TileState state = mask.load(p, tile, first_key, count);
    if (state == TileState::kEmpty) return state;
    if (p.dropout.threshold != 0) load_dropout<kRows>(p.dropout, tile, first_key, count, stays);
    const bool partial = state == TileState::kPartial;
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first_row = piece * kPiece;
      keys[piece] = keys_of_piece(first_row, first_key, count, partial);
      if (keys[piece].empty()) continue;
      with_vectors(first_row, [&](auto vectors) {
        load_piece<vectors()>(first_row, first_key, keys[piece], partial);
      });
    }
    return state;
  }

  /// Calls f with the number of vectors that a piece computes.
  template <class F>
  QKV_INLINE void with_vectors(int first_row, F f) const {
    const int rows = whole ? kPiece : tile.rows - first_row;
    if constexpr (kPieceVectors > 2) {
      if (rows > 2 * S::kWidth) return f(Constant<3>{});
    }
    if constexpr (kPieceVectors > 1) {
      if (rows > S::kWidth) return f(Constant<2>{});
    }
    f(Constant<1>{});
  }

  /// sums[r] -= dS · |p - j|, the row's share of the gradient of its slope.
  void add_slope_gradient(int64_t first_key, int keys, T* sums) const {
    alibi.for_each_distance(
        first_key,
        keys, [&](int k, int v, typename S::Number distance) __attribute__((always_inline)) {
          T* sum = sums + v * S::kWidth;
          const auto ds = S::load(ds_tile + k * kRows + v * S::kWidth);
          S::store(sum, S::fma(S::zero() - ds, distance, S::load(sum)));
        });
  }

  /// dS becomes the gradient of scale · Q Kᵀ. A pair that is not kept keeps its 0.
  void through_softcap(TileState state, int keys) {
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        T* g = ds_tile + k * kRows + v * S::kWidth;
        auto ds = S::load(g) * S::load(cap_tile + k * kRows + v * S::kWidth);
        if (state == TileState::kPartial) {
          ds = S::select(S::bit_of_bytes(mask.bits + k / 8 * kRows + v * S::kWidth, k % 8), ds,
                         S::zero());
        }
        S::store(g, ds);
      }
    }
  }

 private:
  /// Those of the block that rows of a piece need: what they see by the band, cut at multiples
  /// of 8.
  KeyRange keys_of_piece(int first_row, int64_t first_key, int count, bool partial) const {
    if (whole) return {0, count};
    if (first_row >= tile.rows) return {0, 0};
    if (!partial) return {0, count};
    const int last_row = first_row + kPiece <= tile.rows ? first_row + kPiece - 1 : tile.rows - 1;
    const KeyRange seen = keys_of_any(p.band, tile.query[first_row], tile.query[last_row], p.keys);
    const int64_t begin = seen.begin > first_key ? (seen.begin - first_key) / 8 * 8 : 0;
    const int64_t end = (seen.end - first_key + 7) / 8 * 8;
    return {begin, end < count ? end : count};
  }

  template <int kCount>
  void load_piece(int first_row, int64_t first_key, KeyRange range, bool partial) {
    const int64_t key = first_key + range.begin;
    const int count = static_cast<int>(range.end - range.begin);
    T* scores = p_tile + range.begin * kRows + first_row;
    product<kCount>(count, p.head_dim, tile.keys_of_head(p.key) + key * p.key.row_stride,
                    p.key.row_stride, query_t + first_row, scores);
    product<kCount>(count, p.value_dim, tile.keys_of_head(p.value) + key * p.value.row_stride,
                    p.value.row_stride, grad_out_t + first_row,
                    ds_tile + range.begin * kRows + first_row);
    const ScoreRows<T, kCount, kRows> rows{
        p, mask, alibi, key, count, static_cast<int>(range.begin), first_row / S::kWidth, scores};
    rows.modify(cap_tile + range.begin * kRows + first_row);
    if (p.dropout.threshold == 0) {
      partial ? softmax_backward<true, false>(first_row, kCount, range)
              : softmax_backward<false, false>(first_row, kCount, range);
    } else {
      partial ? softmax_backward<true, true>(first_row, kCount, range)
              : softmax_backward<false, true>(first_row, kCount, range);
    }
  }

  template <int kCount>
  static void product(int keys, int64_t depth, const T* a, int64_t a_row, const T* b, T* c) {
    multiply<T, kCount>(
        keys, depth, a, a_row, UnitStride{}, b,
        kRows, [=](int64_t k, int v, typename S::Number x) __attribute__((always_inline)) {
          S::store(c + k * kRows + v * S::kWidth, x);
        });
  }

  /// p_tile: S -> R ∘ P, ds_tile: V dOᵀ -> dS. Pairs that are not kept get 0 by selection, as their
  /// S and dP may be NaN.
  template <bool kMasked, bool kDropout>
  void softmax_backward(int first_row, int vectors, KeyRange range) {
    const auto scale = S::set(dropout_scale<T>(p.dropout));
    for (int v = first_row / S::kWidth; v < first_row / S::kWidth + vectors; ++v) {
      const auto row_lse = S::load(lse + v * S::kWidth);
      const auto row_rest = S::load(lse_rest + v * S::kWidth);
      const auto row_delta = S::load(delta + v * S::kWidth);
      for (auto k = static_cast<int>(range.begin); k < range.end; ++k) {
        T* s = p_tile + k * kRows + v * S::kWidth;
        T* g = ds_tile + k * kRows + v * S::kWidth;
        // Rounding can leave a score of 1e8 above its lse; without the clamp P would overflow.
        const auto below = S::minimum(S::zero(), S::load(s) - row_lse - row_rest);
        const auto probability = exp_of_nonpositive<T>(below);
        auto dp = S::load(g);
        auto used = probability;  // R ∘ P
        if constexpr (kDropout) {
          const auto stays_k = S::bit_of_bytes(stays + k / 8 * kRows + v * S::kWidth, k % 8);
          dp = S::select(stays_k, dp * scale, S::zero());
          used = S::select(stays_k, used * scale, S::zero());
        }
        auto ds = probability * (dp - row_delta);
        if constexpr (kMasked) {
          const auto kept = S::bit_of_bytes(mask.bits + k / 8 * kRows + v * S::kWidth, k % 8);
          used = S::select(kept, used, S::zero());
          ds = S::select(kept, ds, S::zero());
        }
        S::store(s, used);
        S::store(g, ds);
      }
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
