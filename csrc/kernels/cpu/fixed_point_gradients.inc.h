#pragma once

#include "kernels/cpu/fixed_point_avx512.h"
#include "kernels/cpu/gradient_products.inc.h"
#include "kernels/cpu/in_pairs.inc.h"

// The products of gradient_products.inc.h for operands in bfloat16, two terms at a time, in fixed
// point. P and dS would err by 2^-9 each if they were rounded to bfloat16, as much as the rounded
// gradient does. As multiples of something small enough for all that a sum is taken of, they err by
// 2^-17 of that sum:
//
//     dV[n] = sum of P[n][r] · dO[r]
//             dO[r] = o_r · O[r],  o_r a power of 2,        |O[r][d]| < 2^14
//             P[n][r] · o_r = p_n · W[n][r],                |W[n][r]| < 2^15, their sum < 2^17
//           = p_n · sum of W[n][r] · O[r]
//
// with integers O and W of 16 bits, whose sums of products 32 bits hold. O is exact but for what is
// less than 2^-6 of the largest in its row. What is large in one row of dO, K or Q is no measure for
// another row, nor one key for another. dK goes the same way, dQ with rows in the place of keys.
//
// What is not finite makes the number that sums of integers are multiplied by NaN, and so all of the
// gradient's row that it is part of. Pairs that are not kept are left out by selection.

namespace qkv::kernels::QKV_ISA {

class FixedPoint {
 public:
  using S = Simd<float>;
  static constexpr float kOfMatrix = 0x1p13f;  // the least integer for the largest in a row
  static constexpr float kMostOfTile = 32767, kMostOfSum = 131000;
  static_assert((kMostOfSum + 96 / 2) * 2.0 * kOfMatrix < 0x1p31);
  /// Less would have an infinite reciprocal: what is smaller errs by a multiple of 2^-113.
  static constexpr float kLeast = 0x1p-112f;

  /// What the integers of a tile are multiples of, if none of the numbers that are summed exceeds
  /// `largest` and their magnitudes add up to `sum`: NaN or infinite if that is.
  static QKV_INLINE __m512 step_of(__m512 largest, __m512 sum) {
    const auto step = S::maximum(largest * S::set(1 / kMostOfTile), sum * S::set(1 / kMostOfSum));
    return S::maximum(S::set(kLeast), step);
  }
  /// What the sums of their products with a matrix are multiples of.
  static QKV_INLINE __m512 step_of_products(__m512 step) { return step * S::set(1 / kOfMatrix); }

  /// Rows 0 .. count of a matrix, x(r) or nullptr: to[r / 2][d] = (O[r][d], O[r + 1][d]), rows of
  /// whole vectors, and sizes[r] = o_r, whole vectors too: NaN where something is not finite, with
  /// zeros for O. Returns whether nothing is.
  template <class RowOf>
  static bool pack_rows(RowOf x, int64_t count, int64_t width, Int16Pair* to, float* sizes) {
    bool finite = true;
    for (int64_t r = 0; r < count; r += S::kWidth) {
      const BFloat16* rows[S::kWidth];
      __m512 largest[S::kWidth];
      for (int i = 0; i < S::kWidth; ++i) {
        rows[i] = r + i < count ? x(r + i) : nullptr;
        largest[i] = rows[i] != nullptr ? largest_exponents(rows[i], width) : S::zero();
      }
      transpose<float>(largest);
      auto size = S::set(kLeast);
      for (const auto& x : largest) size = S::maximum(size, x);
      const auto infinite = S::equal(size, S::set(__builtin_inff()));
      finite = finite && S::bits_of(infinite) == 0;
      S::store(sizes + r, S::select(infinite, S::set(__builtin_nanf("")), size));
      alignas(64) float scale[S::kWidth];
      S::store(scale, S::set(kOfMatrix) / size);  // 0 for what is infinite
      for (int i = 0; i < S::kWidth && r + i < count; i += 2, to += round_up_to_vector<float>(width)) {
        pack_pair(rows[i], rows[i + 1], width, S::set(scale[i]), S::set(scale[i + 1]), to);
      }
    }
    return finite;
  }

 private:
  /// Powers of 2, infinite for what is not finite: the largest of them is the row's.
  static QKV_INLINE __m512 largest_exponents(const BFloat16* x, int64_t width) {
    __m512i largest = _mm512_setzero_si512();
    const auto exponent = _mm512_set1_epi32(0x7f800000);
    for (int64_t d = 0; d < width; d += 32) {
      const __m512i pairs = _mm512_maskz_loadu_epi16(first_lanes_of_32(width - d), x + d);
      largest = _mm512_max_epi32(largest, _mm512_and_si512(pairs, exponent));
      largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_slli_epi32(pairs, 16), exponent));
    }
    return _mm512_castsi512_ps(largest);
  }

  static QKV_INLINE void pack_pair(const BFloat16* first, const BFloat16* second, int64_t width,
                                   __m512 of_first, __m512 of_second, Int16Pair* to) {
    for (int64_t d = 0; d < width; d += S::kWidth, to += S::kWidth) {
      const auto rounded = [=](const BFloat16* x, __m512 scale) __attribute__((always_inline)) {
        if (x == nullptr) return _mm512_setzero_si512();
        return rounded_to_int16(S::load_first_bfloat16(&x[d].bits, width - d), scale);
      };
      Simd<Int16Pair>::store(to, low_halves(rounded(first, of_first), rounded(second, of_second)));
    }
  }
};

template <class Scores, int kVectors>
class FixedPointGradients : FixedPoint {
 public:
  using Work = BackwardTile<Scores, kVectors>;
  using Pairs = Simd<Int16Pair>;
  static constexpr int kRows = Work::kRows;
  static constexpr int kWidth = S::kWidth;
  static_assert(kRows <= 96 && kBackwardBlockKeys <= 96);  // kMostOfSum

  static int64_t scratch_numbers(const Problem<float>& p) {
    return kRows / 2 * (row_of(p.head_dim) + row_of(p.value_dim)) +
           3 * kBackwardBlockKeys * kRows / 2;
  }
  /// Of so many keys of a unit.
  static int64_t numbers_of_keys(const Problem<float>& p, int64_t count) {
    return round_up_to_vector<float>(count) + (count + 1) / 2 * row_of(p.head_dim);
  }

  FixedPointGradients(const Work& work, float* scratch)
      : work_(work),
        p_(work.p),
        needs_query_(work.params.grad_query.data != nullptr),
        needs_key_(work.params.grad_key.data != nullptr),
        needs_value_(work.params.grad_value.data != nullptr),
        query_{reinterpret_cast<Int16Pair*>(scratch), row_of(p_.head_dim), {}, true},
        grad_out_{query_.pairs + kRows / 2 * query_.row, row_of(p_.value_dim), {}, true},
        weights_{grad_out_.pairs + kRows / 2 * grad_out_.row, {}},
        gradients_{weights_.pairs + kBackwardBlockKeys * kRows / 2, {}},
        gradients_in_lanes_(gradients_.pairs + kBackwardBlockKeys * kRows / 2) {}

  void load_keys(const RowTile<kRows>& tile, KeyRange keys, float* memory) {
    keys = keys_to_copy(p_).intersection(keys);
    if (!needs_query_ || keys.empty()) return;
    keys_ = keys;
    size_of_key_ = memory;
    key_pairs_ = reinterpret_cast<Int16Pair*>(
        memory + round_up_to_vector<float>(keys.end - keys.begin));
    const BFloat16* from =
        tile.template stored_keys_of_head<BFloat16>(p_.key) + keys.begin * p_.key.row_stride;
    keys_finite_ = pack_rows([&](int64_t k) { return from + k * p_.key.row_stride; },
                             keys.end - keys.begin, p_.head_dim, key_pairs_, size_of_key_);
  }

  void load_rows() {
    if (needs_key_) query_.load(work_.tile, p_.query, p_.head_dim);
    if (needs_value_) grad_out_.load(work_.tile, work_.params.grad_out, p_.value_dim);
  }

  void load_block(int64_t first_key, int count, bool partial) {
    first_key_ = first_key;
    count_ = count;
    partial_ = partial;
    set_to_zero(largest_of_row_, kRows);
    set_to_zero(sum_of_row_, kRows);
    // P and dS of pairs that are not kept are 0, but 0 · NaN is NaN; in lanes without a row they may
    // be anything.
    const bool leaves_out = partial && !(keys_finite_ && query_.finite && grad_out_.finite);
    with_constant(leaves_out || work_.tile.rows % kWidth != 0, [&](auto masked) {
      constexpr bool kMasked = masked() != 0;
      work_.seen.for_each_strip(count, [&](KeyRange keys, int first_row, int rows) {
        const int begin = first_row / kWidth, end = (first_row + rows + kWidth - 1) / kWidth;
        with_constant(end - begin == kVectors, [&](auto all) {
          for (int64_t k = keys.begin; k < keys.end; k += kWidth) {
            const int64_t left = keys.end - k;
            load_keys_of_strip<kMasked, all() != 0>(
                k, left < kWidth ? static_cast<int>(left) : kWidth, begin, end);
          }
        });
      });
      if (!needs_query_) return;
      work_.seen.for_each_part([&](int first_vector, auto vectors, KeyRange keys) {
        load_lanes<kMasked>(first_vector, vectors(), keys);
      });
    });
  }

  void add_to_keys(KeySums<float>& of_key, KeySums<float>& of_value) {
    work_.seen.for_each_strip(count_, [&](KeyRange seen, int r, int rows) {
      if (needs_value_) add_strip(weights_, grad_out_, seen, r, rows, of_value);
      if (needs_key_) add_strip(gradients_, query_, seen, r, rows, of_key);
    });
  }

  void add_to_rows(Sums<float> grad_query_t) {
    const int64_t row = row_of(p_.head_dim);
    work_.seen.for_each_part([&](int first_vector, auto vectors, KeyRange seen) {
      const int64_t r = first_vector * kWidth;
      const Sums<float> sums = grad_query_t.from(0, r);
      const Int16Pair* keys = key_pairs_ + (first_key_ + seen.begin - keys_.begin) / 2 * row;
      const float* steps = step_of_row_ + r;
      with_constant(sums.has_any, [&](auto adds) __attribute__((always_inline)) {
        tile_product<Int16Pair, rows_together<Int16Pair, vectors()>(), vectors()>(
            0, p_.head_dim, (seen.end - seen.begin + 1) / 2, keys, UnitStride{}, row,
            gradients_in_lanes_ + seen.begin / 2 * kRows + r, kRows,
            [](int64_t, int) __attribute__((always_inline)) { return Pairs::zero(); },
            each_vector([=](int64_t d, int v, Pairs::Number x) __attribute__((always_inline)) {
              float* to = sums.first + d * sums.row + v * kWidth;
              add_to<adds() != 0>(to, x, S::load(steps + v * kWidth));
            }));
      });
    });
  }

 private:
  static int64_t row_of(int64_t width) { return round_up_to_vector<float>(width); }

  template <bool kAdds>
  static QKV_INLINE void add_to(float* to, Pairs::Number sum, __m512 step) {
    const auto x = __builtin_convertvector(sum, __m512);
    S::store(to, kAdds ? S::fma(x, step, S::load(to)) : x * step);
  }

  /// Q or dO.
  struct Matrix {
    Int16Pair* pairs;  // [rows / 2][row]
    int64_t row;
    alignas(64) float size[kRows];

    bool finite;

    void load(const RowTile<kRows>& tile, const Operand<const float>& x, int64_t width) {
      const auto rows = tile.template stored_rows_in<BFloat16>(x);
      const auto row_of_tile = [&](int64_t r) -> const BFloat16* {
        return r < tile.rows ? rows[static_cast<int>(r)] : nullptr;
      };
      finite = pack_rows(row_of_tile, round_up_to_vector<float>(tile.rows), width, pairs, size);
    }
  };

  /// W of P or dS, which rows are summed of.
  struct Tile {
    Int16Pair* pairs;  // [keys][rows / 2]
    alignas(64) float step[kBackwardBlockKeys];
  };

  /// x · y for the pairs of a key and a vector of rows that are kept, and 0.
  template <bool kMasked>
  QKV_INLINE __m512 product_of_kept(int64_t k, int v, __m512 x, __m512 y) const {
    if constexpr (!kMasked) return x * y;
    __mmask16 lanes = first_lanes(work_.tile.rows - v * kWidth);
    if (partial_) lanes &= S::bit_of_bytes(work_.mask.bits + k / 8 * kRows + v * kWidth, k % 8);
    return S::select(lanes, x * y, S::zero());
  }

  /// `count` keys of the block from k on, vectors begin .. end, kAll of a tile.
  template <bool kMasked, bool kAll>
  void load_keys_of_strip(int64_t k, int count, int begin, int end) {
    if constexpr (kAll) begin = 0, end = kVectors;
    __m512 of_weights[kWidth], of_gradients[kWidth];  // sums of magnitudes in each lane
    for (int i = 0; i < kWidth; ++i) of_weights[i] = of_gradients[i] = S::zero();
    const float* of_keys = needs_query_ ? size_of_key_ + first_key_ - keys_.begin : nullptr;
    for (int i = 0; i < count; ++i) {
      const float* weights = work_.p_tile + (k + i) * kRows;
      const float* gradients = work_.ds_tile + (k + i) * kRows;
      const auto of_key = S::set(needs_query_ ? of_keys[k + i] : 0.0f);
#pragma GCC unroll 6
      for (int v = begin; v < end; ++v) {
        const int r = v * kWidth;
        const auto kept = [&](const float* x, __m512 size) __attribute__((always_inline)) {
          return product_of_kept<kMasked>(k + i, v, S::load(x + r), size);
        };
        of_weights[i] = of_weights[i] + kept(weights, S::load(grad_out_.size + r));
        of_gradients[i] =
            of_gradients[i] + magnitude(kept(gradients, S::load(query_.size + r)));
        const auto in_row = magnitude(kept(gradients, of_key));
        S::store(sum_of_row_ + r, S::load(sum_of_row_ + r) + in_row);
        S::store(largest_of_row_ + r, S::maximum(S::load(largest_of_row_ + r), in_row));
      }
    }
    if (needs_value_) {
      round_strip<kMasked, kAll>(work_.p_tile, grad_out_, of_weights, k, count, begin, end,
                                 weights_);
    }
    if (needs_key_) {
      round_strip<kMasked, kAll>(work_.ds_tile, query_, of_gradients, k, count, begin, end,
                                 gradients_);
    }
  }

  /// sums[key] are what the magnitudes of numbers in each lane add up to.
  template <bool kMasked, bool kAll>
  QKV_INLINE void round_strip(const float* numbers, const Matrix& matrix, __m512 (&sums)[kWidth],
                              int64_t k, int count, int begin, int end, Tile& tile) {
    if constexpr (kAll) begin = 0, end = kVectors;
    transpose<float>(sums);
    auto sum = sums[0], largest = sums[0];
    for (int l = 1; l < kWidth; ++l) {
      sum = sum + sums[l];
      largest = S::maximum(largest, sums[l]);
    }
    const auto step = step_of(largest, sum);
    alignas(64) float scale[kWidth];
    S::store(scale, S::set(1.0f) / step);
    S::store(tile.step + k, step_of_products(step));
    auto* to = reinterpret_cast<int16_t*>(tile.pairs) + k * kRows;
    numbers += k * kRows;
    for (int i = 0; i < count; ++i, to += kRows, numbers += kRows) {
      const auto of_key = S::set(scale[i]);
#pragma GCC unroll 6
      for (int v = begin; v < end; ++v) {
        const auto x = product_of_kept<kMasked>(k + i, v, S::load(numbers + v * kWidth),
                                                S::load(matrix.size + v * kWidth));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + v * kWidth),
                            _mm512_cvtepi32_epi16(rounded_to_int16(x, of_key)));
      }
    }
  }

  /// dS of some vectors of rows.
  template <bool kMasked>
  void load_lanes(int first_vector, int vectors, KeyRange keys) {
    const float* of_keys = size_of_key_ + first_key_ - keys_.begin;
    for (int v = first_vector; v < first_vector + vectors; ++v) {
      const int r = v * kWidth;
      const auto step = step_of(S::load(largest_of_row_ + r), S::load(sum_of_row_ + r));
      const auto scale = S::set(1.0f) / step;
      S::store(step_of_row_ + r, step_of_products(step));
      const auto rounded = [&](int64_t k) __attribute__((always_inline)) {
        const auto ds = S::load(work_.ds_tile + k * kRows + r);
        return rounded_to_int16(product_of_kept<kMasked>(k, v, ds, S::set(of_keys[k])), scale);
      };
      Int16Pair* to = gradients_in_lanes_ + keys.begin / 2 * kRows + r;
      int64_t k = keys.begin;
      for (; k + 1 < keys.end; k += 2, to += kRows) {
        Pairs::store(to, low_halves(rounded(k), rounded(k + 1)));
      }
      if (k < keys.end) Pairs::store(to, low_halves(rounded(k), _mm512_setzero_si512()));
    }
  }

  void add_strip(const Tile& tile, const Matrix& matrix, KeyRange keys, int r, int rows,
                 KeySums<float>& to) {
    const Sums<float> sums = to.to_add_to(first_key_ + keys.begin, first_key_ + keys.end);
    const Int16Pair* pairs = tile.pairs + (keys.begin * kRows + r) / 2;
    const float* steps = tile.step + keys.begin;
    const Int16Pair* from = matrix.pairs + r / 2 * matrix.row;
    const int64_t count = keys.end - keys.begin;
    for_each_columns<Int16Pair>(
        to.width, [&](int64_t d, auto vectors, auto together) __attribute__((always_inline)) {
          const Sums<float> columns = sums.from(0, d);
          with_constant(sums.has_any, [&](auto adds) __attribute__((always_inline)) {
            tile_product<Int16Pair, together(), vectors()>(
                0, count, (rows + 1) / 2, pairs, kRows / 2, UnitStride{}, from + d, matrix.row,
                [](int64_t, int) __attribute__((always_inline)) { return Pairs::zero(); },
                each_vector([=](int64_t n, int v, Pairs::Number x) __attribute__((always_inline)) {
                  add_to<adds() != 0>(columns.first + n * columns.row + v * kWidth, x,
                                      S::set(steps[n]));
                }));
          });
        });
  }

  const Work& work_;
  const Problem<float>& p_;
  bool needs_query_, needs_key_, needs_value_;
  KeyRange keys_{0, 0};
  float* size_of_key_ = nullptr;  // from keys_.begin on, as the pairs
  Int16Pair* key_pairs_ = nullptr;   // [keys / 2][D]
  bool keys_finite_ = true;
  Matrix query_, grad_out_;
  Tile weights_, gradients_;
  Int16Pair* gradients_in_lanes_;  // [keys / 2][rows]
  int64_t first_key_ = 0;          // of the block
  int count_ = 0;
  bool partial_ = false;
  alignas(64) float largest_of_row_[kRows];  // of the block's dS, times the size of the key
  alignas(64) float sum_of_row_[kRows];
  alignas(64) float step_of_row_[kRows];
};

}  // namespace qkv::kernels::QKV_ISA
