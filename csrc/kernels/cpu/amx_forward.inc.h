#pragma once

#include "kernels/cpu/amx_weights.inc.h"
#include "kernels/cpu/few_rows_in_tiles.inc.h"
#include "kernels/cpu/half_tile.inc.h"

// The products of a forward tile in bfloat16 or float16 by AMX, which has the same form as the rest
// of the tile: rows of Q are columns of its matrices.
//
//     S[keys][rows] = K · Qᵀ                A = K, B = Qᵀ in pairs of its columns
//     Oᵀ[Dv][rows] += Vᵀ · P                A = Vᵀ, B = P in pairs of keys, rounded
//
// K and Vᵀ are packed once: for all tiles of a head before these begin, or by those that take
// turns, if they are all that a head has; block by block if that is one. After the rows of Oᵀ,
// filled up to whole tiles, comes the sum of the rounded weights, by which the output is divided in
// the end, as in forward_in_pairs.inc.h.

namespace qkv::kernels::QKV_ISA {

/// K and V of some keys of a head as AMX takes them, with Vᵀ cut into blocks of kTileDepth keys.
template <class Half>
struct PackedKeys {
  Half* keys;         // [keys + 15][D, filled up with zeros]: 16 rows can be read from any key on
  Half* values_t;     // [block][Dv, filled up][key]; 0 for what is not finite
  uint8_t* poisoned;  // [block]: whether something was not
  int64_t first = 0;  // key, with which a block begins

  static int64_t depth(const Problem<float>& p) {
    return (p.head_dim + kTileDepth - 1) / kTileDepth * kTileDepth;
  }
  static int64_t out_rows(const Problem<float>& p) {
    return (p.value_dim + kTileRows - 1) / kTileRows * kTileRows;
  }
  /// Of a block of Vᵀ: an odd number of tiles, for blocks 4096 or 8192 bytes apart take turns in
  /// the first-level cache, which made a forward 1.35 times as slow.
  static int64_t rows_of_block(const Problem<float>& p) { return out_rows(p) | kTileRows; }
  static int64_t blocks(int64_t keys) { return (keys + kTileDepth - 1) / kTileDepth; }

  static int64_t bytes(const Problem<float>& p, int64_t keys) {
    const int64_t numbers =
        (keys + kTileRows - 1) * depth(p) + blocks(keys) * kTileDepth * rows_of_block(p);
    return numbers * static_cast<int64_t>(sizeof(Half)) + (blocks(keys) + 63) / 64 * 64;
  }
  static PackedKeys in(const Problem<float>& p, int64_t keys, void* memory) {
    PackedKeys x;
    x.keys = static_cast<Half*>(memory);
    x.values_t = x.keys + (keys + kTileRows - 1) * depth(p);
    x.poisoned =
        reinterpret_cast<uint8_t*>(x.values_t + blocks(keys) * kTileDepth * rows_of_block(p));
    return x;
  }

  static int64_t first_of_block(int64_t key) { return key / kTileDepth * kTileDepth; }

  Half* key(const Problem<float>& p, int64_t k) const { return keys + (k - first) * depth(p); }
  int64_t block_of(int64_t k) const { return (k - first) / kTileDepth; }
  Half* block(const Problem<float>& p, int64_t b) const {
    return values_t + b * rows_of_block(p) * kTileDepth;
  }

  /// from: the first key of the head.
  void pack_keys(const Problem<float>& p, const Half* from, KeyRange range) const {
    for (int64_t k = range.begin; k < range.end; ++k) {
      for (int64_t d = 0; d < p.head_dim; d += kTileDepth) {
        const int64_t left = p.head_dim - d;
        const auto columns = left < kTileDepth ? (__mmask32(1) << left) - 1 : ~__mmask32(0);
        _mm512_storeu_si512(key(p, k) + d,
                            _mm512_maskz_loadu_epi16(columns, from + k * p.key.row_stride + d));
      }
    }
  }

  /// Whole blocks, from that of range.begin on, with zeros from `end` on.
  void pack_values(const Problem<float>& p, const Half* from, KeyRange range, int64_t end) const {
    const auto row = [&](int64_t k) { return k < end ? from + k * p.value.row_stride : nullptr; };
    for (int64_t k = first_of_block(range.begin); k < range.end; k += kTileDepth) {
      const Half* even[kTileRows];
      const Half* odd[kTileRows];
      for (int l = 0; l < kTileRows; ++l) {
        even[l] = row(k + 2 * l);
        odd[l] = row(k + 2 * l + 1);
      }
      poisoned[block_of(k)] = !pack_columns(even, odd, p.value_dim, block(p, block_of(k)));
    }
  }
};

template <class Half>
class AmxForward {
 public:
  using Real = float;
  using S = Simd<float>;
  using Pair = HalfPair<Half>;
  using Packed = PackedKeys<Half>;
  static constexpr int kVectors = 4;  // of rows in a tile
  static constexpr int kRows = kVectors * S::kWidth;
  using Weigher = RoughWeigher<PowerByScaling>;
  static constexpr bool kScales = false;  // scores
  static constexpr bool kRoundsWeights = true;
  static constexpr bool kWeighsBeside = false;  // products of scores
  static constexpr int kBlockKeys = kForwardBlockKeys;
  static constexpr int kFewRows = FewRowsInTiles<Half>::kMostRows;

  static constexpr int64_t kBytesOfNumber = sizeof(Half);  // as K and V are multiplied

  template <class F>
  static void with_few_rows(Storage, F f) {
    f(Half{}, FewRowsInTiles<Half>{});
  }

  /// Whether a problem of these sizes is better multiplied so.
  static bool takes(const Problem<float>& p) {
    if (are_few_rows(p, kFewRows)) return rows_of_kv_head(p) > 1 && p.keys >= kTileRows;
    return rounds_weights_of(p);
  }

  static int64_t out_rows(const Problem<float>& p) { return row_of_sums(p) + 1; }
  static int64_t row_of_sums(const Problem<float>& p) { return Packed::out_rows(p); }

  /// K and V of one key/value head, if that has several tiles.
  static int64_t prepared_bytes(const Problem<float>& p) {
    return rows_of_kv_head(p) > kRows ? Packed::bytes(p, p.keys) : 0;
  }
  static void prepare(const Problem<float>& p, const RowTile<1>& tile, void* prepared) {
    const auto packed = Packed::in(p, p.keys, prepared);
    packed.pack_keys(p, tile.stored_keys_of_head<Half>(p.key), {0, p.keys});
    packed.pack_values(p, tile.stored_keys_of_head<Half>(p.value), {0, p.keys}, p.keys);
  }

  /// K and V of the keys that tiles take in turn, unless they were prepared.
  class Turn {
   public:
    static int64_t bytes(const Problem<float>& p, int64_t keys) {
      return rows_of_kv_head(p) > kRows ? Packed::bytes(p, keys + kTileDepth) : 0;
    }

    Turn(const ForwardParams<float>& params, int64_t keys, void* memory)
        : p_(params.problem),
          is_prepared_(params.prepared != nullptr),
          packed_(Packed::in(p_, keys + kTileDepth, memory)) {}

    void load(const RowTile<kRows>& tile, KeyRange keys) {
      if (is_prepared_) return;
      keys_ = keys;
      packed_.first = Packed::first_of_block(keys.begin);
      packed_.pack_keys(p_, tile.template stored_keys_of_head<Half>(p_.key), keys);
      packed_.pack_values(p_, tile.template stored_keys_of_head<Half>(p_.value), keys, keys.end);
    }

    bool has(int64_t first_key, int keys) const {
      return keys_.begin <= first_key && first_key + keys <= keys_.end;
    }
    const Packed& packed() const { return packed_; }

   private:
    const Problem<float>& p_;
    bool is_prepared_;
    Packed packed_;
    KeyRange keys_{0, 0};
  };

  static int64_t own_bytes(const Problem<float>& p) {
    return column_pairs(p.head_dim, kRows) * int64_t{sizeof(Pair)};
  }
  static int64_t block_bytes(const Problem<float>& p) {
    const int64_t numbers = (kWeightKeys / 2 + 2 * kTileRows) * kRows;
    return numbers * int64_t{sizeof(float)} + Packed::bytes(p, kWeightKeys);
  }

  AmxForward(const ForwardParams<float>& params, const RowTile<kRows>& tile, const Turn& turn,
             void* own, void* block)
      : p_(params.problem),
        turn_(turn),
        keys_(tile.template stored_keys_of_head<Half>(p_.key)),
        values_(tile.template stored_keys_of_head<Half>(p_.value)),
        query_t_(static_cast<Pair*>(own)),
        weights_(static_cast<Pair*>(block)),
        products_(reinterpret_cast<float*>(weights_ + kWeightKeys / 2 * kRows)) {
    is_prepared_ = params.prepared != nullptr;
    packed_ = is_prepared_ ? Packed::in(p_, p_.keys, prepared_of_head<AmxForward>(params, tile))
                           : Packed::in(p_, kWeightKeys, products_ + 2 * kTileRows * kRows);
    pack_columns_in_pairs(tile, p_.query, p_.head_dim, query_t_);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) {
    pairs_of_keys<kVectors>(
        first_key, keys, first_row, [&](int k, auto count) __attribute__((always_inline)) {
          for_each_vector<kVectors, count()>(
              product(k), [&](int v, auto& x) __attribute__((always_inline)) { finish(k, v, x); });
        });
  }

  /// P[k][row]: weights of the scores, rounded; weigh(k, v, x) makes x, scores of keys from k on,
  /// weights.
  template <int kVectors, class Weigh>
  QKV_INLINE void weights(int64_t first_key, int keys, int first_row, float*, Weigh weigh) {
    store_weights<kVectors>(
        first_key, keys, first_row, weigh, [&](auto use) __attribute__((always_inline)) {
          scores<kVectors>(first_key, keys, first_row, use);
        });
  }

  /// The same of scores that are there already.
  template <int kVectors, class Weigh>
  QKV_INLINE void weights_of_scores(int64_t first_key, int keys, int first_row, const float* scores,
                                    Weigh weigh) {
    store_weights<kVectors>(
        first_key, keys, first_row, weigh, [&](auto use) __attribute__((always_inline)) {
          const auto use_keys = [&](int k, auto count) __attribute__((always_inline)) {
            for_each_vector<kVectors, count()>(
                scores + k * kRows, [&](int v, auto& x)
                                        __attribute__((always_inline)) { use(k, v, x); });
          };
          int k = 0;
          for (; k + 2 <= keys; k += 2) use_keys(k, Constant<2>{});
          if (k < keys) use_keys(k, Constant<1>{});
        });
  }

  /// bits is nullptr if all pairs are kept.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int first_row, const float*, const uint8_t* bits,
                  Sums<float> out) {
    const Packed& packed = packed_for(first_key, keys);
    if (!is_packed(first_key, keys)) {
      packed.pack_values(p_, values_, {first_key, first_key + keys}, p_.keys);
    }
    const int64_t first_block = packed.block_of(first_key);
    const int64_t blocks = packed.block_of(first_key + keys - 1) + 1 - first_block;
    const Pair* pairs = weights_ + first_key % kTileDepth / 2 * kRows + first_row;
    float* sums = out.first + row_of_sums(p_) * kRows;
    for (int v = 0; v < kVectors; ++v, sums += S::kWidth) {
      const auto so_far = out.has_any ? S::load(sums) : S::zero();
      S::store(sums, so_far + sums_of_weights_[v]);
    }
    const auto add_products = [&](auto adds) __attribute__((always_inline)) {
      TileProduct<Half, kVectors, adds() != 0> product{
          blocks,
          {packed.block(p_, first_block), kTileDepth, Packed::rows_of_block(p_) * kTileDepth},
          {weights_ + first_row, kRows},
          out.first,
          kRows};
      for (int64_t d = 0; d < Packed::out_rows(p_); d += kTileRows) {
        product.multiply();
        product.a.data += kTileRows * kTileDepth;
        product.c += kTileRows * kRows;
      }
    };
    with_constant(out.has_any, add_products);
    for (int64_t b = 0; b < blocks; ++b) {
      if (packed.poisoned[first_block + b] == 0) continue;
      const auto weight = [pairs](int k, int r) { return number_of_pairs<kRows>(pairs, k, r); };
      const int64_t stride = p_.value.row_stride;
      add_non_finite<kVectors, kRows>(keys, p_.value_dim, values_ + first_key * stride, stride,
                                      weight, bits, out.first);
      return;
    }
  }

 private:
  /// Blocks of weights begin and end where those of Vᵀ do.
  static constexpr int kWeightKeys = kBlockKeys + kTileDepth;

  /// Where the scores of key k of a block go, beside those of the 16 before or after.
  float* product(int k) const { return products_ + k % (2 * kTileRows) * kRows; }

  /// Whether K and V of these keys were packed before, not with their block.
  bool is_packed(int64_t first_key, int keys) const {
    return is_prepared_ || turn_.has(first_key, keys);
  }

  /// Where they are, or where those of a block go.
  const Packed& packed_for(int64_t first_key, int keys) {
    if (turn_.has(first_key, keys)) return turn_.packed();
    if (!is_prepared_) packed_.first = Packed::first_of_block(first_key);
    return packed_;
  }

  /// Calls use(k, count) for each two of the keys, or the last, when their products are there:
  /// those of 16 keys are multiplied before vectors work on the 16 before them.
  template <int kVectors, class Use>
  QKV_INLINE void pairs_of_keys(int64_t first_key, int keys, int first_row, Use use) {
    const Packed& packed = packed_for(first_key, keys);
    if (!is_packed(first_key, keys)) {
      packed.pack_keys(p_, keys_, {first_key, first_key + keys});
    }
    const int64_t depth = Packed::depth(p_);
    const Half* first_line = packed.key(p_, first_key);
    const auto multiply_keys = [&](int k) __attribute__((always_inline)) {
      TileProduct<Half, kVectors, false>{depth / kTileDepth,
                                         {first_line + k * depth, depth, kTileDepth},
                                         {query_t_ + first_row, kRows},
                                         product(k),
                                         kRows}
          .multiply();
    };
    multiply_keys(0);
    for (int first = 0; first < keys; first += kTileRows) {
      if (first + kTileRows < keys) multiply_keys(first + kTileRows);
      const int end = first + kTileRows < keys ? first + kTileRows : keys;
      int k = first;
      for (; k + 2 <= end; k += 2) use(k, Constant<2>{});
      if (k < end) use(k, Constant<1>{});
    }
  }

  /// Where the weights of some keys go: in blocks that begin and end where those of Vᵀ do, with
  /// zeros around them.
  template <int kVectors>
  Pair* start_weights(int64_t first_key, int keys, int first_row) const {
    const int64_t before = first_key % kTileDepth;
    const int64_t end = Packed::blocks(before + keys) * kTileDepth;
    Pair* to = weights_ + first_row;
    const auto set_to_zero = [to](int64_t first, int64_t end) {
      for (int64_t pair = first; pair < end; ++pair) {
        for (int v = 0; v < kVectors; ++v) {
          _mm512_storeu_si512(to + pair * kRows + v * S::kWidth, _mm512_setzero_si512());
        }
      }
    };
    set_to_zero(0, before / 2);
    set_to_zero((before + keys + 1) / 2, end / 2);
    return to + before / 2 * kRows;
  }

  /// Calls f(v, x) with the vectors x of one or two keys.
  template <int kVectors, int kCount, class F>
  static QKV_INLINE void for_each_vector(const float* from, F f) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      S::Number x[kCount];
      for (int i = 0; i < kCount; ++i) x[i] = S::load(from + i * kRows + v * S::kWidth);
      f(v, x);
    }
  }

  /// for_each(use) calls use(k, v, x) for scores x of one or two keys; what weigh makes of them is
  /// rounded to weights_, and added up to sums_of_weights_.
  template <int kVectors, class Weigh, class ForEach>
  QKV_INLINE void store_weights(int64_t first_key, int keys, int first_row, Weigh weigh,
                                ForEach for_each) {
    S::Number sums[kVectors];
    for (auto& sum : sums) sum = S::zero();
    Pair* to = start_weights<kVectors>(first_key, keys, first_row);
    for_each([&](int k, int v, auto& x) __attribute__((always_inline)) {
      weigh(k, v, x);
      constexpr bool kIsPair = sizeof(x) / sizeof(x[0]) == 2;
      const auto pair = round_weights(Half{}, x[0], kIsPair ? x[kIsPair] : S::zero(), sums[v]);
      _mm512_storeu_si512(to + k / 2 * kRows + v * S::kWidth, pair);
    });
    for (int v = 0; v < kVectors; ++v) sums_of_weights_[v] = sums[v];
  }

  const Problem<float>& p_;
  const Turn& turn_;
  TileRegisters registers_;
  const Half* keys_;
  const Half* values_;
  bool is_prepared_;  // packed_ is of the whole head, else of a block
  Packed packed_;
  Pair* query_t_;    // [D / 2][rows]
  Pair* weights_;    // [keys / 2][rows], of a block
  float* products_;  // [2][16 keys][rows]
  S::Number sums_of_weights_[kVectors];
};

}  // namespace qkv::kernels::QKV_ISA
