#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/forward_tile.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// The products of a forward tile in bfloat16, two terms at a time, summed in float32:
//
//     S[keys][rows] = scale · (K · Qᵀ)      pairs of columns, which lie side by side in K
//     Oᵀ[Dv][rows] += Vᵀ · P                pairs of keys: V is interleaved once for all tiles of a
//                                           head, or block by block if there is one tile only
//
// P is rounded to bfloat16. What the rounded weights add up to is a row of Oᵀ of its own, by which
// the output is divided in the end: it stays a convex combination of values. lse comes from the
// weights before rounding.

namespace qkv::kernels::QKV_ISA {

class BFloat16Source {
 public:
  using Real = float;
  using S = Simd<float>;
  using Pairs = Simd<BFloat16Pair>;
  static constexpr int kRows = kForwardRows<float>;
  static constexpr int kExtraOutRows = 1;
  static constexpr bool kTakesFewRows = false;  // see is_for

  /// With few keys there is little to win, and the rounding of few weights does not average out.
  static bool is_for(const Problem<float>& p) {
    return p.head_dim % 2 == 0 && p.keys >= kForwardBlockKeys &&
           rows_of_kv_head(p) > kFewRows<float>;
  }

  /// Numbers of pairs that V takes in one head.
  static int64_t prepared_pairs(const Problem<float>& p) {
    return rows_of_kv_head(p) > kRows ? (p.keys + 1) / 2 * p.value_dim : 0;
  }

  static int64_t scratch_bytes(const Problem<float>& p) {
    const int64_t pairs =
        (p.head_dim / 2 + kForwardBlockKeys / 2) * kRows + kForwardBlockKeys / 2 * p.value_dim;
    return pairs * static_cast<int64_t>(sizeof(BFloat16Pair));
  }

  BFloat16Source(const ForwardParams<float>& params, const RowTile<kRows>& tile, void* scratch)
      : p_(params.problem),
        keys_(tile.stored_keys_of_head<BFloat16>(p_.key)),
        values_(tile.stored_keys_of_head<BFloat16>(p_.value)),
        query_t_(static_cast<BFloat16Pair*>(scratch)),
        weights_(query_t_ + p_.head_dim / 2 * kRows),
        block_values_(weights_ + kForwardBlockKeys / 2 * kRows) {
    const int64_t head = tile.batch_number * p_.kv_heads + tile.kv_head;
    if (prepared_pairs(p_) > 0) {
      prepared_ = static_cast<const BFloat16Pair*>(params.prepared) + head * prepared_pairs(p_);
    }
    pack_query(tile);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) const {
    const auto scale = S::set(p_.scale);
    tile_product<BFloat16Pair, Pairs::kBroadcastRows, kVectors>(
        0, keys, p_.head_dim / 2, in_pairs(keys_ + first_key * p_.key.row_stride),
        p_.key.row_stride / 2, UnitStride{}, query_t_ + first_row, kRows,
        [](int64_t, int) __attribute__((always_inline)) { return S::zero(); },
        [&](int64_t k, int v, S::Number x)
            __attribute__((always_inline)) { finish(k, v, x * scale); });
  }

  /// bits is nullptr if all pairs are kept. out_t has the sum of the weights after its Dv rows.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int first_row, const float* weights,
                  const uint8_t* bits, float* out_t) const {
    const int64_t row = p_.value.row_stride;
    const BFloat16* values = values_ + first_key * row;
    const bool poisoned = bits != nullptr && !all_finite<float>(values, row, keys, p_.value_dim);
    const bool whole = keys % 2 == 0 || first_key + keys == p_.keys;
    const BFloat16Pair* pairs = block_values_;
    if (prepared_ != nullptr && whole && !poisoned) {
      pairs = prepared_ + first_key / 2 * p_.value_dim;
    } else {
      interleave_values(values, row, keys, p_.value_dim, block_values_);
      if (poisoned) set_non_finite_to_zero(keys);
    }
    round_weights<kVectors>(keys, first_row, weights, out_t + p_.value_dim * kRows);
    tile_product<BFloat16Pair, Pairs::kBroadcastRows, kVectors>(
        0, p_.value_dim, (keys + 1) / 2, pairs, UnitStride{}, p_.value_dim, weights_ + first_row,
        kRows,
        [=](int64_t d, int v)
            __attribute__((always_inline)) { return S::load(out_t + d * kRows + v * S::kWidth); },
        [=](int64_t d, int v, S::Number x)
            __attribute__((always_inline)) { S::store(out_t + d * kRows + v * S::kWidth, x); });
    if (poisoned) add_non_finite<kVectors>(keys, values, weights, bits, out_t);
  }

  static void interleave_values(const BFloat16* values, int64_t row, int64_t keys, int64_t width,
                                BFloat16Pair* to) {
    for (int64_t k = 0; k < keys; k += 2) {
      const BFloat16* first = values + k * row;
      interleave(first, k + 1 < keys ? first + row : nullptr, width, to + k / 2 * width);
    }
  }

 private:
  /// Two numbers that lie side by side.
  static const BFloat16Pair* in_pairs(const BFloat16* x) {
    return reinterpret_cast<const BFloat16Pair*>(x);
  }

  /// query_t_[d / 2][row]: pairs move as float32 numbers do.
  void pack_query(const RowTile<kRows>& tile) {
    const int64_t pairs = p_.head_dim / 2;
    for (int r = 0; r < kRows; r += S::kWidth) {
      const BFloat16Pair* from[S::kWidth];
      for (int l = 0; l < S::kWidth; ++l) {
        from[l] =
            r + l < tile.rows ? in_pairs(tile.stored_row<BFloat16>(p_.query, r + l)) : nullptr;
      }
      for (int64_t d = 0; d < pairs; d += S::kWidth) {
        const int columns = pairs - d < S::kWidth ? static_cast<int>(pairs - d) : S::kWidth;
        S::Number square[S::kWidth];
        for (int l = 0; l < S::kWidth; ++l) {
          alignas(64) BFloat16Pair line[S::kWidth] = {};
          for (int c = 0; c < columns && from[l] != nullptr; ++c) line[c] = from[l][d + c];
          square[l] = _mm512_load_ps(line);
        }
        transpose<float>(square);
        for (int c = 0; c < columns; ++c)
          _mm512_storeu_ps(query_t_ + (d + c) * kRows + r, square[c]);
      }
    }
  }

  /// To weights_; their sums to `sum`.
  template <int kVectors>
  void round_weights(int keys, int first_row, const float* weights, float* sum) const {
    const BFloat16 one{0x3f80};
    const auto ones = Pairs::set({one, one});
    for (int v = 0; v < kVectors; ++v) {
      const float* from = weights + v * S::kWidth;
      BFloat16Pair* to = weights_ + first_row + v * S::kWidth;
      auto total = S::load(sum + v * S::kWidth);
      for (int k = 0; k < keys; k += 2) {
        const auto second = k + 1 < keys ? S::load(from + (k + 1) * kRows) : S::zero();
        const auto pair = Pairs::round(S::load(from + k * kRows), second);
        total = Pairs::fma(pair, ones, total);
        Pairs::store(to + k / 2 * kRows, pair);
      }
      S::store(sum + v * S::kWidth, total);
    }
  }

  static bool is_finite(BFloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }

  void set_non_finite_to_zero(int keys) const {
    for (int64_t x = 0; x < (keys + 1) / 2 * p_.value_dim; ++x) {
      BFloat16Pair& pair = block_values_[x];
      if (!is_finite(pair.first)) pair.first = {0};
      if (!is_finite(pair.second)) pair.second = {0};
    }
  }

  /// What set_non_finite_to_zero took away, for the rows that keep it.
  template <int kVectors>
  void add_non_finite(int keys, const BFloat16* values, const float* weights, const uint8_t* bits,
                      float* out_t) const {
    for (int k = 0; k < keys; ++k) {
      for (int64_t d = 0; d < p_.value_dim; ++d) {
        const BFloat16 x = values[k * p_.value.row_stride + d];
        if (is_finite(x)) continue;
        for (int r = 0; r < kVectors * S::kWidth; ++r) {
          if ((bits[k / 8 * kRows + r] >> (k % 8) & 1) == 0) continue;
          out_t[d * kRows + r] += weights[k * kRows + r] * static_cast<float>(x);
        }
      }
    }
  }

  const Problem<float>& p_;
  const BFloat16* keys_;
  const BFloat16* values_;
  const BFloat16Pair* prepared_ = nullptr;  // [keys / 2][Dv] of this head
  BFloat16Pair* query_t_;                   // [D / 2][rows]
  BFloat16Pair* weights_;                   // [keys / 2][rows], of a block
  BFloat16Pair* block_values_;              // [keys / 2][Dv], of a block
};

/// Interleaves V of one key/value head, if that has several tiles.
inline void prepare_bfloat16(const ForwardParams<float>& params, int64_t head) {
  const Problem<float>& p = params.problem;
  const auto tile = RowTile<1>::make(p, head / p.kv_heads, head % p.kv_heads, 0, 1, 0);
  BFloat16Source::interleave_values(
      tile.stored_keys_of_head<BFloat16>(p.value), p.value.row_stride, p.keys, p.value_dim,
      static_cast<BFloat16Pair*>(params.prepared) + head * BFloat16Source::prepared_pairs(p));
}

}  // namespace qkv::kernels::QKV_ISA
