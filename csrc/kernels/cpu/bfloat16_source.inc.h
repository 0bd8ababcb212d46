#pragma once

#include "kernels/cpu/few_rows_in_pairs.inc.h"
#include "kernels/cpu/half_tile.inc.h"
#include "kernels/cpu/in_pairs.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/weights_in_place.inc.h"

// The products of a forward tile in bfloat16, two terms at a time, summed in float32:
//
//     S[keys][rows] = scale · (K · Qᵀ)      pairs of columns, which lie side by side in K
//     Oᵀ[Dv][rows] += Vᵀ · P                pairs of keys: V is interleaved block by block, or
//                                           once for all tiles that take turns
//
// P is rounded to bfloat16. What the rounded weights add up to is a row of Oᵀ of its own, by which
// the output is divided in the end: it stays a convex combination of values. lse comes from the
// weights before rounding.

namespace qkv::kernels::QKV_ISA {

constexpr int kBFloat16Vectors = 3;  // of rows in a tile

class BFloat16Source
    : public WeightsInPlace<BFloat16Source, float, kBFloat16Vectors * Simd<float>::kWidth> {
 public:
  using Real = float;
  using S = Simd<float>;
  using Pairs = Simd<BFloat16Pair>;
  static constexpr int kVectors = kBFloat16Vectors;
  static constexpr int kRows = kVectors * S::kWidth;
  static constexpr bool kRoundsWeights = true;
  static constexpr int kFewRows = FewRowsInPairs::kMostRows;

  static constexpr int64_t kBytesOfNumber = sizeof(BFloat16);  // as K and V are multiplied

  template <class F>
  static void with_few_rows(Storage, F f) {
    f(BFloat16{}, FewRowsInPairs{});
  }

  /// Whether there is a kernel for a problem of these sizes.
  static bool takes(const Problem<float>& p) {
    return rows_of_kv_head(p) <= kFewRows || multiplies_in_16_bits(p);
  }

  static int64_t out_rows(const Problem<float>& p) { return row_of_sums(p) + 1; }
  static int64_t row_of_sums(const Problem<float>& p) { return p.value_dim; }

  /// Of a key/value head: nothing is.
  static int64_t prepared_bytes(const Problem<float>&) { return 0; }
  static void prepare(const Problem<float>&, const RowTile<1>&, void*) {}

  static int64_t own_bytes(const Problem<float>& p) {
    return column_pairs(p.head_dim, kRows) * static_cast<int64_t>(sizeof(BFloat16Pair));
  }
  static int64_t block_bytes(const Problem<float>& p) {
    const int64_t pairs = kForwardBlockKeys / 2 * (kRows + round_up_to_vector<float>(p.value_dim)) +
                          kForwardBlockKeys * InPairs::depth(p.head_dim);
    return pairs * static_cast<int64_t>(sizeof(BFloat16Pair));
  }

  /// V of the keys that tiles take in turn, in pairs of keys.
  class Turn {
   public:
    static int64_t bytes(const Problem<float>& p, int64_t keys) {
      const int64_t pairs = (keys + 1) / 2 * round_up_to_vector<float>(p.value_dim);
      return pairs * static_cast<int64_t>(sizeof(BFloat16Pair));
    }

    Turn(const Problem<float>& p, void* memory)
        : p_(p), values_(static_cast<BFloat16Pair*>(memory)) {}

    void load(const RowTile<kRows>& tile, KeyRange keys) {
      keys_ = keys;
      const int64_t row = p_.value.row_stride;
      pack_keys_in_pairs(tile.stored_keys_of_head<BFloat16>(p_.value) + keys.begin * row, row,
                         keys.end - keys.begin, p_.value_dim, values_);
    }

    /// first_key is even; an odd number of keys needs a zero after them.
    bool has(int64_t first_key, int keys) const {
      const int64_t end = first_key + keys;
      return keys_.begin <= first_key && end <= keys_.end && (keys % 2 == 0 || end == keys_.end);
    }
    const BFloat16Pair* values(int64_t first_key) const {
      return values_ + (first_key - keys_.begin) / 2 * round_up_to_vector<float>(p_.value_dim);
    }

   private:
    const Problem<float>& p_;
    BFloat16Pair* values_;
    KeyRange keys_{0, 0};
  };

  BFloat16Source(const ForwardParams<float>& params, const RowTile<kRows>& tile, const Turn& turn,
                 void* own, void* block)
      : p_(params.problem),
        tile_(tile),
        turn_(turn),
        values_(tile.stored_keys_of_head<BFloat16>(p_.value)),
        query_t_(static_cast<BFloat16Pair*>(own)),
        weights_(static_cast<BFloat16Pair*>(block)),
        block_values_(weights_ + kForwardBlockKeys / 2 * kRows),
        block_lines_(block_values_ +
                     kForwardBlockKeys / 2 * round_up_to_vector<float>(p_.value_dim)) {
    pack_columns_in_pairs(tile, p_.query, p_.head_dim, query_t_);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) const {
    const auto scale = S::set(p_.scale);
    const Rows<BFloat16Pair> lines = InPairs::lines(tile_, p_.key, p_.key_value_storage, first_key,
                                                    keys, p_.head_dim, block_lines_);
    tile_product<BFloat16Pair, Pairs::kBroadcastRows, kVectors>(
        0, keys, InPairs::depth(p_.head_dim), lines.first, lines.stride, UnitStride{},
        query_t_ + first_row, kRows,
        [](int64_t, int) __attribute__((always_inline)) { return S::zero(); },
        few_at_a_time([&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
          for (auto& score : x) score = score * scale;
          finish(k, v, x);
        }));
  }

  /// bits is nullptr if all pairs are kept. out_t has the sum of the weights after its Dv rows.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int first_row, const float* weights,
                  const uint8_t* bits, float* out_t) const {
    const int64_t row = p_.value.row_stride;
    const BFloat16* values = values_ + first_key * row;
    const bool poisoned = bits != nullptr && !all_finite<float>(values, row, keys, p_.value_dim);
    const BFloat16Pair* pairs = block_values_;
    if (turn_.has(first_key, keys) && !poisoned) {
      pairs = turn_.values(first_key);
    } else {
      pack_keys_in_pairs(values, row, keys, p_.value_dim, block_values_);
      if (poisoned) {
        set_non_finite_to_zero((keys + 1) / 2 * round_up_to_vector<float>(p_.value_dim),
                               block_values_);
      }
    }
    add_rounded_weights<kVectors>(keys, first_row, weights, out_t + row_of_sums(p_) * kRows);
    tile_product<BFloat16Pair, Pairs::kBroadcastRows, kVectors>(
        0, p_.value_dim, (keys + 1) / 2, pairs, UnitStride{},
        round_up_to_vector<float>(p_.value_dim), weights_ + first_row, kRows,
        [=](int64_t d, int v)
            __attribute__((always_inline)) { return S::load(out_t + d * kRows + v * S::kWidth); },
        each_vector([=](int64_t d, int v, S::Number x) __attribute__((always_inline)) {
          S::store(out_t + d * kRows + v * S::kWidth, x);
        }));
    if (poisoned) {
      const auto weight = [weights](int k, int r) { return weights[k * kRows + r]; };
      add_non_finite<kVectors, kRows>(keys, p_.value_dim, values, row, weight, bits, out_t);
    }
  }

 private:
  /// Rounded to weights_; their sums are added to `sum`.
  template <int kVectors>
  void add_rounded_weights(int keys, int first_row, const float* weights, float* sum) const {
    Pairs::Number total[kVectors];
    for (int v = 0; v < kVectors; ++v) total[v] = S::load(sum + v * S::kWidth);
    for (int k = 0; k < keys; k += 2) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const float* from = weights + k * kRows + v * S::kWidth;
        const auto second = k + 1 < keys ? S::load(from + kRows) : S::zero();
        const auto pair = Pairs::round(S::load(from), second);
        total[v] = Pairs::add(pair, total[v]);
        Pairs::store(weights_ + first_row + k / 2 * kRows + v * S::kWidth, pair);
      }
    }
    for (int v = 0; v < kVectors; ++v) S::store(sum + v * S::kWidth, total[v]);
  }

  const Problem<float>& p_;
  const RowTile<kRows>& tile_;
  const Turn& turn_;
  const BFloat16* values_;
  BFloat16Pair* query_t_;       // [D / 2][rows]
  BFloat16Pair* weights_;       // [keys / 2][rows], of a block
  BFloat16Pair* block_values_;  // [keys / 2][Dv], of a block
  BFloat16Pair* block_lines_;   // [keys][D / 2], of a block, if not read where they lie
};

}  // namespace qkv::kernels::QKV_ISA
