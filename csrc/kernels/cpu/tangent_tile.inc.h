#pragma once

#include "kernels/band.h"
#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/tangent_products.inc.h"

// P and S' of one tile of rows and one block of keys: the common part of the derivatives along
// directions Q', K', mask', slope' (a prime is a derivative along them).
//
//     U  = scale · K Qᵀ                       S  = f(U)  + mask  - slope  · dist     f = softcap
//     U' = scale · (K Q'ᵀ + K' Qᵀ)            S' = f'(U) U' + mask' - slope' · dist
//     P  = exp(S - lse)                       and, for f itself, (f'(U))' = f''(U) U'
//
//              rows (lanes) ->
//     S  keys [ ............ ]  then P
//     S' keys [ ............ ]

namespace qkv::kernels::QKV_ISA {

/// Takes all pairs of a tile, or those that are marked and 0 for the others, times a factor.
template <class T>
struct AllPairs {
  QKV_INLINE typename Simd<T>::Number operator()(typename Simd<T>::Number x) const { return x; }
};
template <class T>
struct MarkedPairs {
  typename Simd<T>::Mask marked;
  typename Simd<T>::Number factor;
  QKV_INLINE typename Simd<T>::Number operator()(typename Simd<T>::Number x) const {
    return Simd<T>::select(marked, x * factor, Simd<T>::zero());
  }
};

/// There is one width, however few rows there are; but vectors without a row cost nothing.
template <class Products>
struct TangentTile {
  using T = typename Products::Number;
  using S = Simd<T>;
  using Number = typename S::Number;
  static constexpr int kRows = Products::kRows;
  static constexpr int kVectors = kRows / S::kWidth;
  static constexpr int kBlockKeys = kBackwardBlockKeys;
  static constexpr int64_t kTile = kBlockKeys * kRows;

  const Problem<T>& p;
  const Directions<T>& along;
  const T* lse_of_rows;
  const T* lse_rest_of_rows;
  RowTile<kRows> tile;
  Products products;
  T* p_tile;        // [keys][rows]
  T* scores_t;      // [keys][rows], S'
  T* cap_slopes;    // [keys][rows], f'(U)
  T* cap_slopes_t;  // [keys][rows], its derivative f''(U) U'
  MaskTile<T, kRows> mask;
  uint8_t* stays;    // R != 0
  TileState* state;  // of the block
  AlibiTile<T, kVectors> alibi;
  T* end_of_scratch;       // after the tile of a block, which may be put elsewhere
  T pending_scale = T(1);  // what S and S' still lack
  alignas(64) T lse[kRows];
  alignas(64) T lse_rest[kRows];
  alignas(64) T slope_t[kRows];

  static int64_t scratch_numbers(const TangentMatrices<T>& matrices) {
    return kTile + Products::scratch_numbers(matrices) + block_numbers(matrices.p);
  }

  TangentTile(const TangentMatrices<T>& matrices, const Directions<T>& directions,
              const T* lse_numbers, const T* lse_rest_numbers, void* prepared, T* scratch)
      : p(matrices.p),
        along(directions),
        lse_of_rows(lse_numbers),
        lse_rest_of_rows(lse_rest_numbers),
        products(matrices, prepared, scratch + kTile) {
    mask.bias = scratch;
    end_of_scratch = scratch + scratch_numbers(matrices);
    use_block(end_of_scratch - block_numbers(p));
  }

  /// What is known of the pairs of a block of keys.
  static int64_t block_numbers(const Problem<T>& p) {
    return (p.softcap != T(0) ? 4 : 2) * kTile + kTile / 8;  // two of bits take half of the last
  }

  /// The next block, or one that is there already, is at `numbers`.
  void use_block(T* numbers) {
    p_tile = numbers;
    scores_t = p_tile + kTile;
    cap_slopes = scores_t + kTile;
    cap_slopes_t = cap_slopes + kTile;
    T* end_of_tiles = p.softcap != T(0) ? cap_slopes_t + kTile : cap_slopes;
    mask.bits = reinterpret_cast<uint8_t*>(end_of_tiles);
    stays = mask.bits + kTile / 8;
    state = reinterpret_cast<TileState*>(stays + kTile / 8);
  }

  /// Whether there is an S'.
  bool scores_move() const {
    return along.query.data != nullptr || along.key.data != nullptr ||
           along.attn_mask.data != nullptr || along.alibi_slopes.data != nullptr;
  }

  int vectors() const { return (tile.rows + S::kWidth - 1) / S::kWidth; }

  KeyRange keys_of_rows() const {
    return keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys);
  }

  QKV_ONE_COPY void load_rows() {
    alibi.load(p, tile);
    products.load_rows(tile);
    for (int r = 0; r < kRows; ++r) {
      const bool has_row = r < tile.rows;
      const int64_t scalar = has_row ? tile.scalar(p, r) : 0;
      // A lane without a row gets lse = inf, hence P = 0; and so does a row that keeps nothing.
      const bool keeps = has_row && lse_of_rows[scalar] != -static_cast<T>(__builtin_inff());
      lse[r] = keeps ? lse_of_rows[scalar] : static_cast<T>(__builtin_inff());
      lse_rest[r] = keeps ? lse_rest_of_rows[scalar] : T(0);
      slope_t[r] = has_row && along.alibi_slopes.data != nullptr
                       ? tile.number_of_head(along.alibi_slopes, r)
                       : T(0);
    }
  }

  /// S and S' of the keys first_key .. first_key + keys; for_each_pair makes P of S.
  QKV_ONE_COPY TileState load_block(int64_t first_key, int keys) {
    *state = mask.load(p, tile, first_key, keys);
    if (*state == TileState::kEmpty) return *state;
    products.begin_block({first_key, keys, *state, mask.bits});
    products.multiply(kKey, kQuery, p_tile, /*add=*/false);
    const bool of_query = along.query.data != nullptr, of_key = along.key.data != nullptr;
    const int64_t size = static_cast<int64_t>(keys) * kRows;
    if (of_query) products.multiply(kKey, kQueryT, scores_t, /*add=*/false);
    if (of_key) products.multiply(kKeyT, kQuery, scores_t, /*add=*/of_query);
    if (!of_query && !of_key) set_to_zero(scores_t, size);
    if constexpr (!Products::kScalesScores) scale_scores(size);
    const ScoreRows<T, kVectors, kRows> rows(p, mask, alibi, first_key, 0, 0, TileState::kFull);
    rows.cap(keys, p_tile, cap_slopes);
    if (p.softcap != T(0)) move_through_softcap(size);
    rows.bias(keys, p_tile);
    if (along.attn_mask.data != nullptr) add_mask_t(first_key, keys);
    if (along.alibi_slopes.data != nullptr) {
      alibi.for_each_distance(
          first_key, keys, [&](int k, int v, Number distance) __attribute__((always_inline)) {
            T* moved = scores_t + k * kRows + v * S::kWidth;
            const auto slope = S::load(slope_t + v * S::kWidth);
            S::store(moved, S::fma(S::zero() - slope, distance, S::load(moved)));
          });
    }
    if (p.dropout.threshold != 0) load_dropout<kRows>(p.dropout, tile, first_key, keys, stays);
    return *state;
  }

  /// A block in use that was loaded before.
  TileState reload_block(int64_t first_key, int keys) {
    if (*state != TileState::kEmpty) products.begin_block({first_key, keys, *state, mask.bits});
    return *state;
  }

  /// For each vector v of the rows: x = begin(v), f(x, second, at, kept, dropped, P, S') for key
  /// after key, at offset `at` of a tile, and end(v, x). What x has stays in registers. second() is
  /// 1 for each second key. kept(y) is 0 for a pair that is not kept, as y may be NaN there (P and
  /// S' are 0 already); dropped(y) is R ∘ y.
  /// kWeights: p_tile has P as f was told of it before, and not S.
  template <bool kWeights, class Begin, class F, class End>
  void for_each_pair(int keys, Begin begin, F f, End end) const {
    const bool partial = *state == TileState::kPartial, drops = p.dropout.threshold != 0;
    const auto scale = S::set(dropout_scale<T>(p.dropout)), one = S::set(T(1));
    if (!partial && !drops) {
      for_each_weight<kWeights>(
          keys, begin,
          [&](auto& x, auto second, int, int at, int, Number weight, Number score_t) __attribute__((
              always_inline)) { f(x, second, at, AllPairs<T>{}, AllPairs<T>{}, weight, score_t); },
          end);
      return;
    }
    for_each_weight<kWeights>(
        keys, begin,
        [&](auto& x, auto second, int k, int at, int v, Number weight,
            Number score_t) __attribute__((always_inline)) {
          const auto marked = [&](bool some, const uint8_t* bits) __attribute__((always_inline)) {
            return some ? S::bit_of_bytes(bits + k / 8 * kRows + v * S::kWidth, k % 8)
                        : S::equal(one, one);
          };
          const MarkedPairs<T> kept{marked(partial, mask.bits), one};
          const MarkedPairs<T> dropped{marked(drops, stays), scale};
          f(x, second, at, kept, dropped, kept(weight), kept(score_t));
        },
        end);
  }

 private:
  /// Now, or where P is taken of them, if nothing happens to them before.
  void scale_scores(int64_t size) {
    pending_scale = p.scale;
    if (p.softcap == T(0) && !mask.has_bias(p) && p.alibi_slopes.data == nullptr &&
        along.attn_mask.data == nullptr && along.alibi_slopes.data == nullptr) {
      return;
    }
    for (int64_t x = 0; x < size; x += S::kWidth) {
      S::store(p_tile + x, S::load(p_tile + x) * S::set(pending_scale));
      S::store(scores_t + x, S::load(scores_t + x) * S::set(pending_scale));
    }
    pending_scale = T(1);
  }

  /// scores_t: U' -> f'(U) U', and cap_slopes_t = f''(U) U' with f'' = -2 / c² · f · f'.
  void move_through_softcap(int64_t size) {
    const auto factor = S::set(T(-2) / p.softcap), inverse = S::set(T(1) / p.softcap);
    for (int64_t x = 0; x < size; x += S::kWidth) {
      const auto moved = S::load(cap_slopes + x) * S::load(scores_t + x);
      S::store(scores_t + x, moved);
      S::store(cap_slopes_t + x, factor * (S::load(p_tile + x) * inverse) * moved);
    }
  }

  void add_mask_t(int64_t first_key, int keys) {
    const int64_t step = along.attn_mask.column_stride;
    for (int r = 0; r < tile.rows; ++r) {
      const T* row = tile.row(along.attn_mask, r) + first_key * step;
      for (int k = 0; k < keys; ++k) scores_t[k * kRows + r] += row[k * step];
    }
  }

  QKV_INLINE Number scaled(const T* scores) const {
    if constexpr (Products::kScalesScores) {
      return S::load(scores);
    } else {
      return rounded_product(S::load(scores), S::set(pending_scale));
    }
  }

  template <bool kWeights, class Begin, class F, class End>
  QKV_INLINE void for_each_weight(int keys, Begin begin, F f, End end) const {
    for (int v = 0; v < vectors(); ++v) {
      const auto row_lse = S::load(lse + v * S::kWidth);
      const auto row_rest = S::load(lse_rest + v * S::kWidth);
      auto x = begin(v);
      const auto take = [&](auto second, int k) __attribute__((always_inline)) {
        const int at = k * kRows + v * S::kWidth;
        if constexpr (kWeights) {
          f(x, second, k, at, v, S::load(p_tile + at), scaled(scores_t + at));
        } else {
          // As in the backward: rounding can leave a score of 1e8 above its lse.
          const auto below = S::minimum(S::zero(), scaled(p_tile + at) - row_lse - row_rest);
          f(x, second, k, at, v, exp_of_nonpositive<T>(below), scaled(scores_t + at));
        }
      };
      int k = 0;
      for (; k + 2 <= keys; k += 2) {
        take(Constant<0>{}, k);
        take(Constant<1>{}, k + 1);
      }
      if (k < keys) take(Constant<0>{}, k);
      end(v, x);
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
