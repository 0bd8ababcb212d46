#pragma once

#include "kernels/band.h"
#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/merge.inc.h"
#include "kernels/cpu/next_rows.inc.h"
#include "kernels/cpu/output_rows.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/weigher.inc.h"
#include "kernels/cpu/work_beside.inc.h"
#include "kernels/online_softmax.h"

// Forward attention for one tile of query rows (FlashAttention-2, arXiv:2307.08691, algorithm 1).
//
//     out = dropout(softmax(softcap(scale · Q Kᵀ) + mask - ALiBi)) V
//     lse = log of the sum that the softmax divides by, a sink included
//
// Everything is kept transposed: the rows of the tile lie in the lanes of vectors, so that maxima
// and sums over keys are vertical, and K and V are used as they lie in memory.
//
//              rows (lanes) ->                         for each block of Products::kBlockKeys keys:
//     Qᵀ   D  [ ................ ]                      S = scale · K · Qᵀ      [keys][rows]
//     S  keys [ ................ ]  one block           softcap, mask, ALiBi
//                                                       P = exp(S - max)        in place
//                                                       dropout
//     Oᵀ  Dv  [ ................ ]                      Oᵀ += Vᵀ · P            [Dv][rows]
//
// Products read and multiply: forward_products.inc.h, forward_in_pairs.inc.h, amx_forward.inc.h.
//
// Of a block that the edge of the band runs through, only those vectors of rows that see some of 16
// keys take part in them:
//
//     rows ->    0..15  16..31  32..47
//     keys 0      ###     ###     ###
//         16       .      ###     ###
//         32       .       .      ###

namespace qkv::kernels::QKV_ISA {

/// Keys of a block, unless Products take more; with masks they take no more either, for it is
/// blocks that masks leave out.
constexpr int kForwardBlockKeys = 128;
constexpr int kEdgeKeys = 16;

template <class Products>
class ForwardTile {
 public:
  using T = typename Products::Real;
  using S = Simd<T>;
  using Math = VectorMath<T>;
  using Weigher = typename Products::Weigher;
  using Number = typename S::Number;
  static constexpr int kRows = Products::kRows;
  using Tile = RowTile<kRows>;

  /// What a tile needs from its first block of keys to its last; that of Products comes after.
  static int64_t own_bytes(const Problem<T>& p) {
    return Products::out_rows(p) * kRows * static_cast<int64_t>(sizeof(T)) + Products::own_bytes(p);
  }
  /// What it needs for one block; that of Products comes after.
  static int64_t block_bytes(const Problem<T>& p) {
    return 2 * Products::kBlockKeys * kRows * static_cast<int64_t>(sizeof(T)) + kBitBytes +
           Products::block_bytes(p);
  }
  static constexpr int64_t kBitBytes = 2 * Products::kBlockKeys / 8 * kRows;

  /// Of the keys of `split`, those that some row sees. `fetches`: they come from memory, or from a
  /// cache that is far.
  ForwardTile(const ForwardParams<T>& params, const Tile& tile, KeyRange split, bool fetches,
              const typename Products::Turn& turn, void* own, void* block)
      : params_(params),
        p_(params.problem),
        tile_(tile),
        fetches_(fetches),
        out_t_(static_cast<T*>(own)),
        scores_(static_cast<T*>(block)),
        mask_{reinterpret_cast<uint8_t*>(scores_ + 2 * Products::kBlockKeys * kRows),
              scores_ + Products::kBlockKeys * kRows},
        stays_(mask_.bits + Products::kBlockKeys / 8 * kRows),
        products_(params, tile, turn, out_t_ + Products::out_rows(p_) * kRows,
                  mask_.bits + kBitBytes),
        any_(keys_of_any(p_.band, tile.first_query(), tile.last_query(), p_.keys)
                 .intersection(split)),
        all_(keys_of_all(p_.band, tile.first_query(), tile.last_query(), p_.keys)),
        next_key_(first_of_eight(any_.begin)) {
    alibi_.load(p_, tile);
    drops_ = p_.dropout.threshold != 0;
    set_scales();
    has_masks_ = p_.attn_mask.type != MaskType::kNone || p_.key_mask.data != nullptr;
    block_keys_ = has_masks_ ? kForwardBlockKeys : Products::kBlockKeys;
    vectors_ = (tile.rows + S::kWidth - 1) / S::kWidth;
    for (auto& s : softmax_) s.clear();
  }

  /// What run_until(end_of_keys) takes in, but for what its last block has after end_of_keys.
  KeyRange next_keys(int64_t end_of_keys) const {
    return KeyRange{next_key_, any_.end}.intersection({0, end_of_keys});
  }

  /// Fetches, while it takes in keys, where its results go and the query of the tile `next`.
  void fetch_ahead(const Tile& next) {
    fetches_ahead_ = true;
    out_ahead_ = lines_of_tile(tile_, params_.out, params_.out_storage, p_.value_dim);
    query_ahead_ = lines_of_tile(next, p_.query, p_.key_value_storage, p_.head_dim);
  }

  /// Takes in the next blocks of keys, up to the first that begins at `end_of_keys` or after it.
  void run_until(int64_t end_of_keys) {
    while (next_key_ < any_.end && next_key_ < end_of_keys) {
      const int64_t n = next_key_;
      // Blocks end where all rows begin to see the keys, and where they cease to.
      int64_t end = n + block_keys_ < any_.end ? n + block_keys_ : any_.end;
      const int64_t begin_of_all = first_of_eight(all_.begin + 7);
      const int64_t end_of_all = first_of_eight(all_.end);
      if (n < begin_of_all && begin_of_all < end) end = begin_of_all;
      if (n < end_of_all && end_of_all < end) end = end_of_all;
      add_block(n, static_cast<int>(end - n));
      next_key_ = end;
    }
  }

  /// [ out, not normalised | max | sum ] of each row, for merge().
  void write_partial(T* partial) {
    alignas(64) T max[kRows], sum[kRows], factor[kRows];
    begin_sums();
    store_softmax(max, sum, factor);
    const int64_t row = partial_row(p_);
    for (int r = 0; r < tile_.rows; r += S::kWidth) {
      T* to[S::kWidth];
      for (int l = 0; l < S::kWidth; ++l)
        to[l] = r + l < tile_.rows ? partial + (r + l) * row : nullptr;
      transpose_columns<T>(out_t_ + r, kRows, p_.value_dim, S::load(factor + r), to);
    }
    for (int r = 0; r < tile_.rows; ++r) {
      partial[r * row + p_.value_dim] = max[r];
      partial[r * row + p_.value_dim + 1] = sum[r];
    }
  }

  void write_results() {
    alignas(64) T max[kRows], sum[kRows], factor[kRows], normaliser[kRows];
    bool has_keys[kRows];
    begin_sums();
    store_softmax(max, sum, factor);
    for (int r = 0; r < tile_.rows; ++r) has_keys[r] = sum[r] != T(0);
    for (int v = 0; v < Products::kVectors; ++v) {
      S::store(normaliser + v * S::kWidth, softmax_[v].normaliser());
    }
    for (int r = 0; p_.sinks.data != nullptr && r < tile_.rows; ++r) {
      normaliser[r] = add_sink(tile_.number_of_head(p_.sinks, r), max[r], sum[r]);
    }
    const auto dropout = S::set(dropout_scale<T>(p_.dropout));
    for (int r = 0; r < vectors_ * S::kWidth; r += S::kWidth) {
      S::store(normaliser + r, S::load(normaliser + r) * (dropout * S::load(factor + r)));
    }
    write_logsumexp(params_, tile_, max, sum, has_keys);
    if (params_.out.data == nullptr) return;
    OutputRows<T, kRows>(params_, tile_).write_transposed(out_t_, normaliser);
  }

 private:
  /// What is left of the scale goes with the weights, unless something is added to scores or caps
  /// them first.
  void set_scales() {
    if (Products::kScales) return;
    constexpr T kLargest = T(0x1p100);  // whose products with log2 e are finite
    const bool changes =
        p_.softcap != T(0) || mask_.has_bias(p_) || p_.alibi_slopes.data != nullptr;
    const bool weigher_scales = !changes && p_.scale > T(0) && p_.scale < kLargest;
    (weigher_scales ? scale_of_weights_ : scale_of_scores_) = p_.scale;
  }

  /// With Products that round weights, factor is sum / the sum of the rounded ones.
  void store_softmax(T* max, T* sum, T* factor) const {
    for (int v = 0; v < Products::kVectors; ++v) {
      S::store(max + v * S::kWidth, softmax_[v].max);
      S::store(sum + v * S::kWidth, softmax_[v].sum);
    }
    for (int r = 0; r < kRows; ++r) factor[r] = T(1);
    if constexpr (Products::kRoundsWeights) {
      if (p_.dropout.threshold != 0) return;
      const T* rounded_sum = out_t_ + Products::row_of_sums(p_) * kRows;
      for (int r = 0; r < kRows; ++r) {
        if (sum[r] != T(0)) factor[r] = sum[r] / rounded_sum[r];
      }
    }
  }

  /// Zeros, if nothing has been summed yet.
  void begin_sums() {
    if (!has_sums_) set_to_zero(out_t_, Products::out_rows(p_) * kRows);
    has_sums_ = true;
  }

  void add_block(int64_t first_key, int keys) {
    const TileState state = mask_.load(p_, tile_, first_key, keys);
    if (state == TileState::kEmpty) return;
    if (drops_) load_dropout<kRows>(p_.dropout, tile_, first_key, keys, stays_);
    // Neighbouring pieces seen by the same vectors go together.
    for (int begin = 0, end; begin < keys; begin = end) {
      end = state == TileState::kFull ? keys : begin + kEdgeKeys;
      const Vectors seen = state == TileState::kFull
                               ? Vectors{0, vectors_}
                               : vectors_that_see(first_key + begin, keys - begin);
      while (end < keys && vectors_that_see(first_key + end, keys - end) == seen) end += kEdgeKeys;
      if (end > keys) end = keys;
      const auto add = [&](auto vectors) {
        add_keys<vectors()>(first_key + begin, end - begin, begin, seen.first, state);
      };
      if (seen.count == 1) add(Constant<1>{});
      if (seen.count == 2) add(Constant<2>{});
      if (seen.count == 3) add(Constant<3>{});
      if constexpr (Products::kVectors == 4) {
        if (seen.count == 4) add(Constant<4>{});
      }
    }
  }

  NextKeys keys_to_fetch(int64_t first_key, int keys) const {
    if (!fetches_) return {false, {}, {}};
    const int64_t after = first_key + keys;
    const KeyRange next = KeyRange{after, after + keys}.intersection({0, any_.end});
    const Storage storage = p_.key_value_storage;
    return {true, next_rows<T>(tile_, p_.value, storage, {first_key, after}, p_.value_dim),
            next_rows<T>(tile_, p_.key, storage, next, p_.head_dim)};
  }

  /// With the scores of `keys` keys from k on and vector v of the rows.
  QKV_INLINE void fetch(int64_t k, int keys, int v, const NextKeys& next) {
    if (v == 0) next.fetch(k, keys);
    if (!fetches_ahead_) return;
    out_ahead_.fetch_next();
    query_ahead_.fetch_next();
  }

  struct Vectors {
    int first, count;
    bool operator==(const Vectors& x) const { return first == x.first && count == x.count; }
  };

  /// The vectors with rows that see, by the band, any of the next kEdgeKeys keys.
  Vectors vectors_that_see(int64_t first_key, int keys) const {
    const KeyRange piece{first_key, first_key + (keys < kEdgeKeys ? keys : kEdgeKeys)};
    Vectors seen{0, 0};
    for (int v = 0; v < vectors_; ++v) {
      const int first_row = v * S::kWidth, last_row = first_row + S::kWidth - 1;
      const int64_t last_query = tile_.query[last_row < tile_.rows ? last_row : tile_.rows - 1];
      if (keys_of_any(p_.band, tile_.query[first_row], last_query, p_.keys)
              .intersection(piece)
              .empty()) {
        continue;
      }
      if (seen.count == 0) seen.first = v;
      ++seen.count;
    }
    return seen;
  }

  /// Some keys of the block, at `offset` in it, for some vectors of the tile.
  template <int kVectors>
  void add_keys(int64_t first_key, int keys, int offset, int first_vector, TileState state) {
    const int first_row = first_vector * S::kWidth;
    const int64_t first_bits = offset / 8 * kRows + first_row;
    T* weights = scores_ + first_row;
    const Scores<kVectors> scores(p_, mask_, alibi_, first_key, offset, first_vector, state);
    weigh_keys<kVectors>(first_key, keys, first_vector, scores,
                         drops_ ? stays_ + first_bits : nullptr, weights);
    has_begun_ = true;
    if (params_.out.data == nullptr) return;
    // The first sums are written, if they are those of all rows.
    if (kVectors < vectors_) begin_sums();
    const uint8_t* bits = mask_.bits + first_bits;
    products_.template add_values<kVectors>(first_key, keys, first_row, weights,
                                            state == TileState::kPartial ? bits : nullptr,
                                            Sums<T>{out_t_ + first_row, kRows, has_sums_});
    has_sums_ = true;
  }

  template <int kVectors>
  using Scores = ScoreRows<T, kVectors, kRows>;

  /// What happens to scores before they are weighed: nothing, and no weight is dropped; or scale,
  /// bias, mask and dropout; or the softcap among these.
  enum Changes { kNone = 0, kMasks = 1, kCaps = 2 };

  /// P = exp(S - max) of some keys.
  template <int kVectors>
  void weigh_keys(int64_t first_key, int keys, int first_vector, const Scores<kVectors>& scores,
                  const uint8_t* stays, T* weights) {
    if constexpr (Products::kWeighsBeside && Products::kRoundsWeights) {
      products_.weights_go_after(0);
      if (!has_begun_ && !has_masks_ && are_plain(scores) && keys >= 2 * Products::kFirstKeys) {
        weigh_first_block<kVectors>(first_key, keys, first_vector, scores, stays, weights);
        return;
      }
    }
    weigh_some<kVectors>(first_key, keys, first_vector, scores, stays, weights);
  }

  /// The block that a tile begins with, of rounded weights, which leave scores where they are.
  /// Passes over its first keys find maxima, under which the others can be weighed beside products.
  template <int kVectors>
  void weigh_first_block(int64_t first_key, int keys, int first_vector,
                         const Scores<kVectors>& scores, const uint8_t* stays, T* weights) {
    constexpr int kFirst = Products::kFirstKeys;
    const int64_t second_key = first_key + kFirst;
    const int others = keys - kFirst;
    T* const after = weights + kFirst * kRows;
    weigh_some<kVectors>(first_key, kFirst, first_vector, scores, stays, weights);
    products_.weights_go_after(kFirst);
    if (!weigh_some<kVectors>(second_key, others, first_vector, scores, stays, after)) return;
    // The first weights are under maxima that are too small now: all again, of the scores that are
    // still there, and summed in the same two parts, so that no row's bits depend on whether
    // another has outgrown its maximum.
    for (int v = 0; v < kVectors; ++v) {
      softmax_[first_vector + v].sum = S::zero();
      block_max_[v] = Math::minus_infinity();
    }
    products_.weights_go_after(0);
    weigh_scores<kVectors>(first_key, kFirst, first_vector, stays, weights);
    products_.weights_go_after(kFirst);
    weigh_scores<kVectors>(second_key, others, first_vector, stays, after);
  }

  /// In registers, beside products, or in passes. Whether a maximum was raised.
  template <int kVectors>
  bool weigh_some(int64_t first_key, int keys, int first_vector, const Scores<kVectors>& scores,
                  const uint8_t* stays, T* weights) {
    const NextKeys next = keys_to_fetch(first_key, keys);
    bool weighed = false;
    // With ALiBi rows outgrow their maxima from block to block, up to where they stand.
    if (passes_to_come_ == 0 && p_.alibi_slopes.data == nullptr) {
      const auto weigh_now = [&](auto changes) {
        weighed = weigh_in_registers<kVectors, changes()>(first_key, keys, first_vector, scores,
                                                          stays, next, weights);
      };
      scores.is_capped() ? weigh_now(Constant<kCaps>{})
                         : with_constant(!are_plain(scores), weigh_now);
    }
    if (weighed) return false;
    find_scores<kVectors>(first_key, keys, first_vector, scores, next, weights);
    return weigh_scores<kVectors>(first_key, keys, first_vector, stays, weights);
  }

  /// Whether scores are weighed as they leave their product, and no weight is dropped.
  template <int kVectors>
  bool are_plain(const Scores<kVectors>& scores) const {
    return !scores.changes() && !drops_ && scale_of_scores_ == T(1);
  }

  /// What happens to x, scores of a few keys from k on; they raise max, if end_weighing asks it.
  template <int kChanges, int kVectors, int kCount>
  QKV_INLINE void change(int64_t k, int v, const Scores<kVectors>& scores, Number (&x)[kCount],
                         Number& max) const {
#pragma GCC unroll 4
    for (auto& score : x) {
      if constexpr (kChanges != kNone) score = scaled(score, scale_of_scores_);
      if constexpr (kChanges == kCaps) score = scores.capped(score);
      if constexpr (kChanges != kNone) score = scores.biased_and_kept(k++, v, score);
      if constexpr (!Weigher::kSaturates) max = S::maximum(max, score);
    }
  }

  /// P where S leaves the registers of the product, under the maxima of the keys before. False, and
  /// no weights, if a row has none yet or one that is too small now, or too far from 0.
  template <int kVectors, int kChanges>
  bool weigh_in_registers(int64_t first_key, int keys, int first_vector,
                          const Scores<kVectors>& scores, const uint8_t* stays,
                          const NextKeys& next, T* weights) {
    if constexpr (Products::kWeighsBeside && kChanges != kCaps) {  // a softcap: not tried
      if (keys % kMostRowsBeside == 0) {
        return weigh_beside<kVectors, kChanges>(first_key, keys, first_vector, scores, stays, next,
                                                weights);
      }
    }
    Weigher weigher[kVectors];
    Number sum[kVectors], block_max[kVectors];
    if (!begin_weighing<kVectors>(first_vector, weigher, sum, block_max)) return false;
    products_.template weights<kVectors>(
        first_key, keys, first_vector * S::kWidth,
        weights, [&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
          fetch(k, count_of(x), v, next);
          change<kChanges>(k, v, scores, x, block_max[v]);
          weigher[v].replace_near(x);
          add_few(x, sum[v]);
          if constexpr (kChanges != kNone) drop(stays, k, v, x);
        });
    return end_weighing<kVectors>(first_vector, sum, block_max);
  }

  /// The same while the next keys' scores are multiplied. Maxima of plain ones are found before.
  template <int kVectors, int kChanges>
  bool weigh_beside(int64_t first_key, int keys, int first_vector, const Scores<kVectors>& scores,
                    const uint8_t* stays, const NextKeys& next, T* weights) {
    Weigher weigher[kVectors];
    Number sum[kVectors], block_max[kVectors];
    if (!begin_weighing<kVectors>(first_vector, weigher, sum, block_max)) return false;
    products_.template weights_beside<kVectors>(
        first_key, keys, first_vector * S::kWidth, weights,
        [&](const auto& x) __attribute__((always_inline)) {
          constexpr int kSeen = kChanges == kNone ? kVectors : 0;
#pragma GCC unroll 4
          for (int v = 0; v < kSeen; ++v) {
            auto max = block_max[v];
#pragma GCC unroll 8
            for (int i = 0; i < kRowsBeside<kVectors>; ++i) max = S::maximum(max, x[i][v]);
            block_max[v] = max;
          }
        },
        [&](int64_t k, auto vector, auto& x) __attribute__((always_inline)) {
          constexpr int v = vector();
          fetch(k, count_of(x), v, next);
          if constexpr (kChanges != kNone) change<kChanges>(k, v, scores, x, block_max[v]);
          weigher[v].replace_near(x);
          add_few(x, sum[v]);
          if constexpr (kChanges != kNone) drop(stays, k, v, x);
        });
    return end_weighing<kVectors>(first_vector, sum, block_max);
  }

  /// Under the maxima of the keys before. False if a row has none yet or one too far from 0.
  template <int kVectors>
  bool begin_weighing(int first_vector, Weigher (&weigher)[kVectors], Number (&sum)[kVectors],
                      Number (&block_max)[kVectors]) const {
    const auto lowest = S::set(-Limits<T>::kLargest);
    for (int v = 0; v < kVectors; ++v) {
      const auto& max = softmax_[first_vector + v].max;
      if (S::any_greater(lowest, max) || !Weigher::is_near(max)) return false;
      weigher[v] = Weigher(max, scale_of_weights_);
      sum[v] = S::zero();
      block_max[v] = Math::minus_infinity();
    }
    return true;
  }

  /// False, and nothing is summed, if a row has outgrown its maximum, or may have: if one of its
  /// weights is too large, and saturates, so is their sum. Rows that have not get the same bits.
  template <int kVectors>
  bool end_weighing(int first_vector, const Number (&sum)[kVectors],
                    Number (&block_max)[kVectors]) {
    bool grows = false;
    if constexpr (Weigher::kSaturates) {
      for (const auto& x : sum) grows |= S::any_greater(x, Math::almost_exp_of_slack());
    } else {
      for (auto& max : block_max) max = scaled(max, scale_of_weights_);
      grows = outgrow<kVectors>(block_max, first_vector);
    }
    if (grows) {
      passes_to_come_ = kPassesAfterGrowth;
      return false;
    }
    add_to_sums<kVectors>(sum, first_vector);
    return true;
  }

  /// Whether a row's maximum is too small for these.
  template <int kVectors>
  bool outgrow(const Number* block_max, int first_vector) const {
    bool grows = false;
    for (int v = 0; v < kVectors; ++v) {
      grows |= S::any_greater(block_max[v], softmax_[first_vector + v].limit());
    }
    return grows;
  }

  /// S and its maxima.
  template <int kVectors>
  void find_scores(int64_t first_key, int keys, int first_vector, const Scores<kVectors>& scores,
                   const NextKeys& next, T* to) {
    for (int v = 0; v < kVectors; ++v) block_max_[v] = Math::minus_infinity();
    products_.template scores<kVectors>(
        first_key, keys,
        first_vector * S::kWidth, [&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
          fetch(k, count_of(x), v, next);
          T* line = to + k * kRows + v * S::kWidth;
          auto max = block_max_[v];
#pragma GCC unroll 4
          for (auto& score : x) {
            score = scaled(score, scale_of_scores_);
            S::store(line, score);
            line += kRows;
            max = S::maximum(max, score);
          }
          block_max_[v] = max;
        });
    if (scores.changes()) scores.change(keys, to, block_max_);
    for (int v = 0; v < kVectors; ++v) block_max_[v] = scaled(block_max_[v], scale_of_weights_);
  }

  /// P of S and its maxima. Whether one was raised.
  template <int kVectors>
  bool weigh_scores(int64_t first_key, int keys, int first_vector, const uint8_t* stays,
                    T* weights) {
    const bool raised = raise_max<kVectors>(first_vector);
    Weigher weigher[kVectors];
    Number sum[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      weigher[v] = Weigher(softmax_[first_vector + v].shift(), scale_of_weights_);
      sum[v] = S::zero();
    }
    products_.template weights_of_scores<kVectors>(
        first_key, keys, first_vector * S::kWidth,
        weights, [&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
          weigher[v].replace(x);
          add_few(x, sum[v]);
          drop(stays, k, v, x);
        });
    add_to_sums<kVectors>(sum, first_vector);
    return raised;
  }

  /// Those of some keys, summed before they are added, as O is in multiply_add.
  template <int kVectors>
  void add_to_sums(const Number* sums, int first_vector) {
    for (int v = 0; v < kVectors; ++v) {
      auto& sum = softmax_[first_vector + v].sum;
      sum = sum + sums[v];
    }
  }

  static QKV_INLINE Number scaled(Number x, T scale) {
    if constexpr (Products::kScales) {
      return x;
    } else {
      return rounded_product(x, S::set(scale));
    }
  }

  /// Those weights, of keys from k on, become 0 where they are dropped.
  template <int kCount>
  static QKV_INLINE void drop(const uint8_t* stays, int64_t k, int v, Number (&x)[kCount]) {
    if (stays == nullptr) return;
#pragma GCC unroll 4
    for (auto& weight : x) weight = undropped<T, kRows>(stays, k++, v, weight);
  }

  /// Rows whose maximum has grown too far shrink what they have summed under the smaller one. A row
  /// decides for itself: its bits must not depend on its neighbours.
  template <int kVectors>
  bool raise_max(int first_vector) {
    const bool grows = outgrow<kVectors>(block_max_, first_vector);
    if (passes_to_come_ > 0) passes_to_come_ = grows ? kPassesAfterGrowth : passes_to_come_ - 1;
    if (!grows) return false;
    Number correction[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      auto& softmax = softmax_[first_vector + v];
      const auto too_small = S::less(softmax.limit(), block_max_[v]);
      correction[v] = softmax.raise_max(S::select(too_small, block_max_[v], softmax.max));
    }
    if (!has_sums_) return true;
    for (int64_t d = 0; d < Products::out_rows(p_); ++d) {
      for (int v = 0; v < kVectors; ++v) {
        T* o = out_t_ + d * kRows + (first_vector + v) * S::kWidth;
        S::store(o, S::load(o) * correction[v]);
      }
    }
    return true;
  }

  // Where a row has outgrown its maximum, and registers worked in vain, others soon will: so many
  // passes without one, which take little longer, until registers are tried again.
  static constexpr int kPassesAfterGrowth = 8;

  const ForwardParams<T>& params_;
  const Problem<T>& p_;
  const Tile& tile_;
  bool fetches_;                // K and V
  bool fetches_ahead_ = false;  // the lines of:
  LinesOfTile out_ahead_, query_ahead_;
  T* out_t_;   // [Dv and what else Products sum under the same maximum][rows]
  T* scores_;  // [keys][rows], then the weights
  MaskTile<T, kRows> mask_;
  uint8_t* stays_;
  AlibiTile<T, Products::kVectors> alibi_;
  OnlineSoftmax<Math> softmax_[Products::kVectors];
  // Of the scores that passes weigh. In memory, as registers are short where it is found.
  Number block_max_[Products::kVectors];
  Products products_;
  KeyRange any_;  // keys that some row sees
  KeyRange all_;  // keys that all rows see
  int64_t next_key_;
  int block_keys_;
  int vectors_;             // that have rows
  bool has_begun_ = false;  // to weigh
  bool has_sums_ = false;   // in out_t_
  bool has_masks_;
  bool drops_;
  T scale_of_scores_ = T(1), scale_of_weights_ = T(1);  // where Products do not scale
  int passes_to_come_ = 0;                              // before registers are tried
};

}  // namespace qkv::kernels::QKV_ISA
