#pragma once

#include "kernels/cpu/few_rows_in_pairs.inc.h"
#include "kernels/cpu/few_rows_of_numbers.inc.h"
#include "kernels/cpu/half_tile.inc.h"
#include "kernels/cpu/in_pairs.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/power_by_table.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/values_in_lanes.inc.h"
#include "kernels/cpu/work_beside.inc.h"

// The products of a forward tile in bfloat16, two terms at a time, summed in float32:
//
//     S[keys][rows] = K · Qᵀ                pairs of columns, which lie side by side in K
//     Oᵀ[Dv][rows] += Vᵀ · P                pairs of keys: V is interleaved block by block, once
//                                           for all tiles that take turns, or in registers where
//                                           a tile has one vector of rows
//
// P is rounded to bfloat16. What the rounded weights add up to is a row of Oᵀ of its own, by which
// the output is divided in the end: it stays a convex combination of values. lse comes from the
// weights before rounding.

namespace qkv::kernels::QKV_ISA {

constexpr int kBFloat16Vectors = 3;  // of rows in a tile

class ForwardInPairs {
 public:
  using Real = float;
  using S = Simd<float>;
  using Pairs = Simd<BFloat16Pair>;
  static constexpr int kVectors = kBFloat16Vectors;
  static constexpr int kRows = kVectors * S::kWidth;
  using Weigher = RoughWeigher<PowerByTable>;
  static constexpr bool kScales = false;  // scores
  static constexpr bool kRoundsWeights = true;
  static constexpr bool kWeighsBeside = true;  // products of scores
  /// Whose maxima others are weighed under. The largest of so many weights is 1, which loses
  /// nothing when it is rounded; of more keys it is one of many.
  static constexpr int kFirstKeys = 64;
  /// Weights of 16 bits: those of twice as many keys stay in a first-level cache, and what they are
  /// added to is loaded and stored half as often.
  static constexpr int kBlockKeys = 2 * kForwardBlockKeys;
  static constexpr int kFewRows = FewRowsInPairs::kMostRows;

  static constexpr int64_t kBytesOfNumber = sizeof(BFloat16);  // as K and V are multiplied

  template <class F>
  static void with_few_rows(Storage, F f) {
    f(BFloat16{}, FewRowsInPairs{});
  }

  /// Whether a problem of these sizes is better multiplied so. Of 5 to 8 rows those that have a
  /// kernel in numbers stay there, unless there are many keys.
  static bool takes(const Problem<float>& p) {
    if (rows_of_kv_head(p) <= kFewRows) return true;
    if (p.head_dim % 2 != 0 || !rounds_weights_of(p)) return false;
    const bool few = are_few_rows(p, FewRowsOfNumbers<float, BFloat16>::kMostRows);
    return !few || p.keys >= kForwardBlockKeys;
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
    const int64_t pairs = kBlockKeys / 2 * (kRows + round_up_to_vector<float>(p.value_dim)) +
                          kBlockKeys * InPairs::depth(p.head_dim);
    return pairs * static_cast<int64_t>(sizeof(BFloat16Pair));
  }

  /// V of the keys that tiles take in turn, in pairs of keys.
  class Turn {
   public:
    static int64_t bytes(const Problem<float>& p, int64_t keys) {
      const int64_t pairs = (keys + 1) / 2 * round_up_to_vector<float>(p.value_dim);
      return pairs * static_cast<int64_t>(sizeof(BFloat16Pair));
    }

    Turn(const ForwardParams<float>& params, int64_t, void* memory)
        : p_(params.problem), values_(static_cast<BFloat16Pair*>(memory)) {}

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

  ForwardInPairs(const ForwardParams<float>& params, const RowTile<kRows>& tile, const Turn& turn,
                 void* own, void* block)
      : p_(params.problem),
        tile_(tile),
        turn_(turn),
        values_(tile.stored_keys_of_head<BFloat16>(p_.value)),
        query_t_(static_cast<BFloat16Pair*>(own)),
        weights_(static_cast<BFloat16Pair*>(block)),
        block_values_(weights_ + kBlockKeys / 2 * kRows),
        block_lines_(block_values_ + kBlockKeys / 2 * round_up_to_vector<float>(p_.value_dim)) {
    pack_columns_in_pairs(tile, p_.query, p_.head_dim, query_t_);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) const {
    const Rows<BFloat16Pair> lines = InPairs::lines(tile_, p_.key, p_.key_value_storage, first_key,
                                                    keys, p_.head_dim, block_lines_);
    tile_product<BFloat16Pair, rows_together<BFloat16Pair, kVectors>(), kVectors>(
        0, keys, InPairs::depth(p_.head_dim), lines.first, lines.stride, UnitStride{},
        query_t_ + first_row, kRows,
        [](int64_t, int) __attribute__((always_inline)) { return S::zero(); },
        few_at_a_time(finish));
  }

  /// Weights that come next go after those of so many keys of the block, which stay.
  void weights_go_after(int keys) {
    for (int v = 0; v < kVectors; ++v) sums_before_[v] = keys > 0 ? sums_of_weights_[v] : S::zero();
    next_weights_ = weights_ + keys / 2 * kRows;
  }

  /// P[k][row]: weights of the scores, rounded; weigh(k, v, x) makes x, scores of keys from k on,
  /// weights.
  template <int kVectors, class Weigh>
  QKV_INLINE void weights(int64_t first_key, int keys, int first_row, float*, Weigh weigh) {
    store_weights<kVectors>(
        first_row, weigh, [&](auto use) __attribute__((always_inline)) {
          scores<kVectors>(first_key, keys, first_row, use);
        });
  }

  /// The same while the scores of the next keys are multiplied (work_beside.inc.h), of a multiple
  /// of kMostRowsBeside keys: see(x) gets the scores of a few keys before they are weighed.
  template <int kVectors, class See, class Weigh>
  QKV_INLINE void weights_beside(int64_t first_key, int keys, int first_row, float*, See see,
                                 Weigh weigh) {
    const Rows<BFloat16Pair> lines = InPairs::lines(tile_, p_.key, p_.key_value_storage, first_key,
                                                    keys, p_.head_dim, block_lines_);
    S::Number sums[kVectors];
    for (auto& sum : sums) sum = S::zero();
    BFloat16Pair* to = next_weights_ + first_row;
    const auto work = [&](int64_t k, auto vector, auto& x) __attribute__((always_inline)) {
      constexpr int v = vector();
      weigh(k, vector, x);
      const auto pair = Pairs::round(x[0], x[1]);
      sums[v] = Pairs::add(pair, sums[v]);
      Pairs::store(to + k / 2 * kRows + v * S::kWidth, pair);
    };
    product_with_work<BFloat16Pair, kVectors>(keys, InPairs::depth(p_.head_dim), lines.first,
                                              lines.stride, query_t_ + first_row, kRows, see, work);
    for (int v = 0; v < kVectors; ++v) sums_of_weights_[v] = sums_before_[v] + sums[v];
  }

  /// As `weights`, of scores that are there already.
  template <int kVectors, class Weigh>
  QKV_INLINE void weights_of_scores(int64_t, int keys, int first_row, const float* scores,
                                    Weigh weigh) {
    store_weights<kVectors>(
        first_row, weigh, [&](auto use) __attribute__((always_inline)) {
          const auto use_few = [&](int k, auto count) __attribute__((always_inline)) {
            for (int v = 0; v < kVectors; ++v) {
              S::Number x[count()];
              for (int i = 0; i < count(); ++i)
                x[i] = S::load(scores + (k + i) * kRows + v * S::kWidth);
              use(k, v, x);
            }
          };
          int k = 0;
          for (; k + 4 <= keys; k += 4) use_few(k, Constant<4>{});
          if (k + 2 <= keys) {
            use_few(k, Constant<2>{});
            k += 2;
          }
          if (k < keys) use_few(k, Constant<1>{});
        });
  }

  /// Of those weights. bits is nullptr if all pairs are kept. out_t has the sum of the weights
  /// after its Dv rows.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int first_row, const float*, const uint8_t* bits,
                  Sums<float> out) const {
    float* out_t = out.first;
    const int64_t row = p_.value.row_stride;
    const BFloat16* values = values_ + first_key * row;
    const bool poisoned = bits != nullptr && !all_finite<float>(values, row, keys, p_.value_dim);
    add_sums_of_weights<kVectors>(out);
    if (takes_values_in_lanes<float, kVectors>(keys, p_.value_dim) && keys % 2 == 0 && !poisoned &&
        !turn_.has(first_key, keys)) {
      add_values_where_they_lie(keys, values, weights_ + first_row, out);
      return;
    }
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
    const BFloat16Pair* weights = weights_ + first_row;
    const bool has_any = out.has_any;
    tile_product<BFloat16Pair, rows_together<BFloat16Pair, kVectors>(), kVectors>(
        0, p_.value_dim, (keys + 1) / 2, pairs, UnitStride{},
        round_up_to_vector<float>(p_.value_dim), weights, kRows,
        [=](int64_t d, int v) __attribute__((always_inline)) {
          return has_any ? S::load(out_t + d * kRows + v * S::kWidth) : S::zero();
        },
        each_vector([=](int64_t d, int v, S::Number x) __attribute__((always_inline)) {
          S::store(out_t + d * kRows + v * S::kWidth, x);
        }));
    if (poisoned) {
      const auto weight = [weights](int k, int r) { return number_of_pairs<kRows>(weights, k, r); };
      add_non_finite<kVectors, kRows>(keys, p_.value_dim, values, row, weight, bits, out_t);
    }
  }

 private:
  template <int kVectors>
  void add_sums_of_weights(Sums<float> out) const {
    float* sums = out.first + row_of_sums(p_) * kRows;
    for (int v = 0; v < kVectors; ++v, sums += S::kWidth) {
      const auto so_far = out.has_any ? S::load(sums) : S::zero();
      S::store(sums, so_far + sums_of_weights_[v]);
    }
  }

  /// Of one vector of rows; an even number of keys, of which two are interleaved in registers.
  /// (`interleaved` asks whether there is a second one, which took a tenth of the time here.)
  void add_values_where_they_lie(int keys, const BFloat16* values, const BFloat16Pair* weights,
                                 Sums<float> out) const {
    const int64_t row = p_.value.row_stride;
    for (int64_t d = 0; d < p_.value_dim; d += S::kWidth) {
      const int64_t left = p_.value_dim - d;
      const int columns = left < S::kWidth ? static_cast<int>(left) : S::kWidth;
      S::Number sum[S::kWidth];
      float* const lines = out.first + d * kRows;
      for (int c = 0; c < S::kWidth; ++c) {
        sum[c] = out.has_any && c < columns ? S::load(lines + c * kRows) : S::zero();
      }
      transpose<float>(sum);
      with_constant(
          columns == S::kWidth, [&](auto whole) __attribute__((always_inline)) {
            const __mmask16 lanes = first_lanes(columns);
            const auto wide = [=](const BFloat16* x) __attribute__((always_inline)) {
              return _mm512_cvtepu16_epi32(
                  whole() != 0 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))
                               : _mm256_maskz_loadu_epi16(lanes, x));
            };
            const auto load = [=](int64_t k) __attribute__((always_inline)) {
              const BFloat16* first = values + 2 * k * row + d;
              return reinterpret_cast<Pairs::Factor>(
                  _mm512_or_si512(wide(first), _mm512_slli_epi32(wide(first + row), 16)));
            };
            add_values_in_lanes(keys / 2, weights, kRows, load, sum);
          });
      transpose<float>(sum);
      for (int c = 0; c < columns; ++c) S::store(lines + c * kRows, sum[c]);
    }
  }

  /// for_each(use) calls use(k, v, x) for scores x of a few keys from k on, an even number; what
  /// weigh makes of them is rounded to next_weights_, and added up to sums_of_weights_.
  template <int kVectors, class Weigh, class ForEach>
  QKV_INLINE void store_weights(int first_row, Weigh weigh, ForEach for_each) {
    S::Number sums[kVectors];
    for (auto& sum : sums) sum = S::zero();
    BFloat16Pair* to = next_weights_ + first_row;
    for_each([&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
      weigh(k, v, x);
      constexpr int kCount = sizeof(x) / sizeof(x[0]);
      BFloat16Pair* line = to + k / 2 * kRows + v * S::kWidth;
#pragma GCC unroll 2
      for (int i = 0; i < kCount; i += 2, line += kRows) {
        const auto pair = Pairs::round(x[i], i + 1 < kCount ? x[i + 1] : S::zero());
        sums[v] = Pairs::add(pair, sums[v]);
        Pairs::store(line, pair);
      }
    });
    for (int v = 0; v < kVectors; ++v) sums_of_weights_[v] = sums_before_[v] + sums[v];
  }

  const Problem<float>& p_;
  const RowTile<kRows>& tile_;
  const Turn& turn_;
  const BFloat16* values_;
  BFloat16Pair* query_t_;  // [D / 2][rows]
  BFloat16Pair* weights_;  // [keys / 2][rows], of a block
  BFloat16Pair* next_weights_;
  S::Number sums_before_[kVectors], sums_of_weights_[kVectors];
  BFloat16Pair* block_values_;  // [keys / 2][Dv], of a block
  BFloat16Pair* block_lines_;   // [keys][D / 2], of a block, if not read where they lie
};

}  // namespace qkv::kernels::QKV_ISA
