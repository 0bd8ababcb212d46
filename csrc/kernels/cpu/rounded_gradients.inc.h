#pragma once

#include "kernels/cpu/gradient_products.inc.h"
#include "kernels/cpu/in_pairs.inc.h"

// What P and dS add to the gradients, multiplied in bfloat16 two at a time and summed in float32.
// A unit of 16 rows of every three (in dV and dK), or of 16 keys of every two (in dQ), is taken in
// as two numbers, of which the second is what the first leaves; the others are rounded. So
// gradients err by 1.3 times what rounding them once does, with everything rounded by 1.4 times.
//
//     place        0..7            8..15           16..23          24..31
//     pairs of     rows 0..15,     rows 0..15,     rows 16..31,    rows 32..47,    and so on
//                  the first       what is left    rounded         rounded
//
// Q, dO and K have the same pairs in both places. As all rounded differences of a row of dS, r,
// no longer add up to 0, what all keys have in common would not cancel out of dQ: where a tile
// takes in all keys of a block, a last pair is (r, r) x the mean of the keys, in two numbers.
//
// With few keys or rows there is little to win, and the rounding of few weights does not average
// out: float32 multiplies them.
//
// What is not finite in Q, dO and K is left out, and added afterwards for the pairs that are kept.

namespace qkv::kernels::QKV_ISA {

template <class Scores, int kVectors>
class RoundedGradients : public GradientProducts<Scores, kVectors> {
 public:
  using Base = GradientProducts<Scores, kVectors>;
  using Base::kRows;
  using typename Base::S;

  static int64_t scratch_numbers(const Problem<float>& p) {
    return Base::scratch_numbers(p) + (kRowPlaces + kKeyPlaces) * row_of(p.head_dim) +
           kRowPlaces * row_of(p.value_dim) + kBackwardBlockKeys * kRowPlaces + kKeyPlaces * kRows;
  }

  RoundedGradients(const typename Base::Work& work, KeySums<float>* key_sums,
                   KeySums<float>* value_sums, float* scratch)
      : Base(work, key_sums, value_sums, scratch),
        rounds_(p_.keys >= kForwardBlockKeys && kVectors > 1) {
    auto* pairs = reinterpret_cast<BFloat16Pair*>(scratch + Base::scratch_numbers(p_));
    const auto take = [&pairs](int64_t count) {
      auto* first = pairs;
      pairs += count;
      return first;
    };
    query_ = take(kRowPlaces * row_of(p_.head_dim));
    grad_out_ = take(kRowPlaces * row_of(p_.value_dim));
    keys_ = take(kKeyPlaces * row_of(p_.head_dim));
    tile_of_rows_ = take(kBackwardBlockKeys * kRowPlaces);
    tile_of_keys_ = take(kKeyPlaces * kRows);
  }

  void load_rows() {
    if (!rounds_) return Base::load_rows();
    if (key_sums_ != nullptr) query_finite_ = pack_rows(p_.query, p_.head_dim, query_);
    if (value_sums_ != nullptr) {
      grad_out_finite_ = pack_rows(work_.params.grad_out, p_.value_dim, grad_out_);
    }
  }

  void add_to_keys(int64_t first_key, int count, bool partial) {
    if (!rounds_) return Base::add_to_keys(first_key, count, partial);
    const auto add = [&](const float* tile, const BFloat16Pair* packed, bool finite,
                         const Operand<const float>& x, int64_t width, KeySums<float>& sums) {
      add_product(tile, packed, row_of(width), first_key, count, sums);
      if (finite) return;
      const auto rows = work_.tile.template stored_rows_in<BFloat16>(x);
      add_non_finite_rows<kRows>(
          count, work_.tile.rows, width, [&](int r) { return rows[r]; }, tile, bits_if(partial),
          sums.to_add_to(first_key, first_key + count));
    };
    if (value_sums_ != nullptr) {
      add(work_.p_tile, grad_out_, grad_out_finite_, work_.params.grad_out, p_.value_dim,
          *value_sums_);
    }
    if (key_sums_ != nullptr) {
      add(work_.ds_tile, query_, query_finite_, p_.query, p_.head_dim, *key_sums_);
    }
  }

  void add_to_rows(int64_t first_key, int count, bool partial, Sums<float> grad_query_t) {
    if (!rounds_) return Base::add_to_rows(first_key, count, partial, grad_query_t);
    const int64_t stride = p_.key.row_stride;
    const BFloat16* keys =
        work_.tile.template stored_keys_of_head<BFloat16>(p_.key) + first_key * stride;
    const bool finite = pack_keys(keys, stride, count);
    const int64_t row = row_of(p_.head_dim);
    work_.seen.for_each_part([&](int first_vector, auto vectors, KeyRange seen) {
      const int64_t r = first_vector * S::kWidth, begin = UnitsOfKeys::places(seen.begin);
      int64_t depth = UnitsOfKeys::places(seen.end) - begin;
      round_keys<vectors()>(work_.ds_tile + r, seen, tile_of_keys_ + r, !partial);
      if (!partial) ++depth;
      multiply_add<BFloat16Pair, vectors()>(p_.head_dim, depth, keys_ + begin * row, UnitStride{},
                                            row, tile_of_keys_ + begin * kRows + r, kRows,
                                            grad_query_t.from(0, r));
    });
    if (finite) return;
    const auto gradient = [&](int k, int r) { return work_.ds_tile[k * kRows + r]; };
    add_non_finite<kVectors, kRows>(count, p_.head_dim, keys, stride, gradient, bits_if(partial),
                                    grad_query_t.first);
  }

 private:
  using Base::key_sums_, Base::p_, Base::value_sums_, Base::work_;
  using Pairs = Simd<BFloat16Pair>;

  static constexpr int kUnit = 16;  // rows or keys
  static constexpr int kPairs = kUnit / 2;

  /// One of kWholeOf units is two numbers.
  template <int kWholeOf>
  struct Units {
    static constexpr bool is_whole(int64_t unit) { return unit % kWholeOf == 0; }

    /// Of the pairs of so many rows or keys, the last unit filled up.
    static constexpr int64_t places(int64_t count) { return place_of((count + kUnit - 1) / kUnit); }
    static constexpr int64_t place_of(int64_t unit) {
      return (unit + (unit + kWholeOf - 1) / kWholeOf) * kPairs;
    }
  };
  using UnitsOfRows = Units<3>;
  using UnitsOfKeys = Units<2>;  // dQ errs by what the forward's rounded output says of dS, too
  static constexpr int64_t kRowPlaces = UnitsOfRows::places(kRows);
  static constexpr int64_t kKeyPlaces = UnitsOfKeys::places(kBackwardBlockKeys) + 1;

  /// Rows of pairs that a product reads a few columns at a time do not share the sets of a
  /// first-level cache.
  static int64_t row_of(int64_t width) {
    const int64_t row = round_up_to_vector<float>(width);
    return row % 64 == 0 ? row + S::kWidth : row;
  }

  /// What row_at gives for 0 .. count in pairs of two, where units are whole in two places.
  template <class Units, class RowAt>
  static void pack(int64_t count, int64_t width, RowAt row_at, BFloat16Pair* to) {
    const int64_t row = row_of(width);
    const auto number = [&](int64_t r) { return r < count ? row_at(r) : nullptr; };
    for (int64_t r = 0; r < count; r += kUnit) {
      for (int i = 0; i < kPairs; ++i, to += row) {
        interleave(number(r + 2 * i), number(r + 2 * i + 1), width, to);
        if (Units::is_whole(r / kUnit)) __builtin_memcpy(to + kPairs * row, to, row * sizeof(*to));
      }
      if (Units::is_whole(r / kUnit)) to += kPairs * row;
    }
  }

  /// The sum of packed rows in a vector of columns.
  template <class Units>
  static typename S::Number sum_of(int64_t count, int64_t row, const BFloat16Pair* packed) {
    auto sum = S::zero();
    for (int64_t unit = 0; unit * kUnit < count; ++unit) {
      const BFloat16Pair* pairs = packed + Units::place_of(unit) * row;
      for (int i = 0; i < kPairs; ++i) sum = Pairs::add(Pairs::load(pairs + i * row), sum);
    }
    return sum;
  }

  const uint8_t* bits_if(bool partial) const { return partial ? work_.mask.bits : nullptr; }

  /// Of Q or dO. Are all finite? Those that are not become zeros.
  QKV_ONE_COPY bool pack_rows(const Operand<const float>& x, int64_t width, BFloat16Pair* to) {
    const auto rows = work_.tile.template stored_rows_in<BFloat16>(x);
    const int64_t count = work_.tile.rows;
    pack<UnitsOfRows>(
        count, width, [&](int64_t r) { return rows[static_cast<int>(r)]; }, to);
    return keep_finite<UnitsOfRows>(count, width, to);
  }

  /// A block of keys, their mean after them. Are all finite? Those that are not become zeros.
  QKV_ONE_COPY bool pack_keys(const BFloat16* first, int64_t stride, int count) {
    const int64_t row = row_of(p_.head_dim);
    pack<UnitsOfKeys>(
        count, p_.head_dim, [&](int64_t k) { return first + k * stride; }, keys_);
    const bool finite = keep_finite<UnitsOfKeys>(count, p_.head_dim, keys_);
    BFloat16Pair* means = keys_ + UnitsOfKeys::places(count) * row;
    for (int64_t d = 0; d < p_.head_dim; d += S::kWidth) {
      const auto sum = sum_of<UnitsOfKeys>(count, row, keys_ + d);
      const auto mean = S::select(S::equal(sum * S::zero(), S::zero()), sum, S::zero()) *
                        S::set(1.0f / static_cast<float>(count));
      const auto most = most_of(mean);
      Pairs::store(means + d, Pairs::round(most, mean - most));
    }
    return finite;
  }

  template <class Units>
  static bool keep_finite(int64_t count, int64_t width, BFloat16Pair* packed) {
    auto zeros = S::zero();  // or NaN
    const int64_t row = row_of(width);
    for (int64_t d = 0; d < width; d += S::kWidth) {
      zeros = S::fma(sum_of<Units>(count, row, packed + d), S::zero(), zeros);
    }
    if (S::bits_of(S::equal(zeros, S::zero())) == 0xffff) return true;
    set_non_finite_to_zero(Units::places(count) * row, packed);
    return false;
  }

  /// The first of two numbers that are to be rounded: what is left has no more digits than x.
  static QKV_INLINE typename S::Number most_of(typename S::Number x) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(~0xffff)));
  }

  /// Adds tile · rows to the sums of the keys from first_key on.
  void add_product(const float* tile, const BFloat16Pair* rows, int64_t row, int64_t first_key,
                   int count, KeySums<float>& sums) {
    work_.seen.for_each_strip(count, [&](KeyRange seen, int r, int rows_seen) {
      BFloat16Pair* rounded = tile_of_rows_ + seen.begin * kRowPlaces;
      const int64_t begin = UnitsOfRows::places(r);
      round_rows(tile + seen.begin * kRows, seen.end - seen.begin, r, rows_seen, rounded);
      multiply_add_rows<BFloat16Pair, kRowPlaces>(
          seen.end - seen.begin, UnitsOfRows::places(r + rows_seen) - begin, rounded + begin,
          rows + begin * row, row, sums.width,
          sums.to_add_to(first_key + seen.begin, first_key + seen.end));
    });
  }

  /// The vectors of rows from r on, of so many keys, to pairs of rows.
  static void round_rows(const float* tile, int64_t keys, int r, int rows, BFloat16Pair* to) {
    for (int64_t v = r / kUnit; v * kUnit < r + rows; ++v) {
      const float* from = tile + v * kUnit;
      auto* halves = reinterpret_cast<uint16_t*>(to + UnitsOfRows::place_of(v));
      constexpr int64_t kNext = 2 * kRowPlaces;
      if (UnitsOfRows::is_whole(v)) {
        for (int64_t k = 0; k < keys; ++k, from += kRows, halves += kNext) {
          const auto x = S::load(from), most = most_of(x);
          _mm512_storeu_si512(halves, Pairs::halves(most, x - most));
        }
      } else {
        for (int64_t k = 0; k < keys; ++k, from += kRows, halves += kNext) {
          S::store_bfloat16(halves, S::load(from));
        }
      }
    }
  }

  /// kCount vectors of rows of some keys to pairs of keys; if `rest`, after them what they lack
  /// together, twice.
  template <int kCount>
  static void round_keys(const float* tile, KeyRange keys, BFloat16Pair* to, bool rest) {
    for (int v = 0; v < kCount; ++v, tile += S::kWidth, to += S::kWidth) {
      const auto number = [&](int64_t k) {
        return k < keys.end ? S::load(tile + k * kRows) : S::zero();
      };
      auto all = S::zero(), rounded = S::zero();
      for (int64_t unit = keys.begin / kUnit; unit * kUnit < keys.end; ++unit) {
        BFloat16Pair* pairs = to + UnitsOfKeys::place_of(unit) * kRows;
        const bool whole = UnitsOfKeys::is_whole(unit);
        for (int i = 0; i < kPairs; ++i, pairs += kRows) {
          const int64_t k = unit * kUnit + 2 * i;
          const auto first = number(k), second = number(k + 1);
          if (whole) {
            const auto most = most_of(first), most_of_second = most_of(second);
            Pairs::store(pairs, Pairs::round(most, most_of_second));
            Pairs::store(pairs + kPairs * kRows,
                         Pairs::round(first - most, second - most_of_second));
          } else {
            const auto pair = Pairs::round(first, second);
            Pairs::store(pairs, pair);
            all = all + (first + second);
            rounded = Pairs::add(pair, rounded);
          }
        }
      }
      if (!rest) continue;
      const auto lacks = all - rounded;
      Pairs::store(to + UnitsOfKeys::places(keys.end) * kRows, Pairs::round(lacks, lacks));
    }
  }

  const bool rounds_;
  bool query_finite_ = true, grad_out_finite_ = true;
  BFloat16Pair* query_;         // [places of rows][D]
  BFloat16Pair* grad_out_;      // [places of rows][Dv]
  BFloat16Pair* keys_;          // [places of keys][D]
  BFloat16Pair* tile_of_rows_;  // [keys][places of rows]
  BFloat16Pair* tile_of_keys_;  // [places of keys][rows]
};

}  // namespace qkv::kernels::QKV_ISA
