#pragma once

#include "kernels/cpu/fixed_point_avx512.h"
#include "kernels/cpu/gradient_products.inc.h"
#include "kernels/cpu/in_pairs.inc.h"

// The products of gradient_products.inc.h for operands in bfloat16, two terms at a time, in fixed
// point. P and dS would err by 2^-9 each if they were rounded to bfloat16, as much as the rounded
// gradient does. Here all terms of a sum are rounded to multiples of one step, and err by 2^-16 of
// the largest or 2^-18 of what their magnitudes add up to, whichever is more:
//
//     dV[n][d] = sum of P[n][r] · dO[r][d]
//                dO[r][d] = o_r · c_d · O[r][d],  powers of 2 and        |O[r][d]| < 2^14
//                P[n][r] · o_r = p_n · W[n][r],   a step and             |W[n][r]| < 2^15,
//                                                 whose sum over r is at most 131048
//              = p_n · c_d · sum of W[n][r] · O[r][d]
//
// with integers O and W of 16 bits, whose sums of products 32 bits hold. O is exact but for what is
// less than 2^-6 of the largest, by row and column. dK goes the same way, dQ with rows in the place
// of keys.
//
// Steps and powers depend on all rows of the tile and keys of the block. So only those go this way
// of which all pairs are kept, and matrices in whose columns the largest numbers are zeros or from
// 2^-60 to 2^60; all others are multiplied in float32. So is what has a value dim above 128: dS
// grow with it, and with them what their rounding does to dQ and dK. And heads of up to 12 rows,
// for which K is not worth being made integers.

namespace qkv::kernels::QKV_ISA {

/// What integers stand for, and how many bits they have.
class FixedPoint {
 public:
  using S = Simd<float>;
  static constexpr float kOfMatrix = 0x1p13f;  // the least integer for the largest in a row
  static constexpr float kMostOfTile = 32767, kMostOfSum = 131000;
  static constexpr int kMostTerms = 96;
  static_assert((kMostOfSum + kMostTerms / 2) * 2.0 * kOfMatrix < 0x1p31);
  static constexpr float kSmallest = 0x1p-60f, kLargest = 0x1p60f;         // in columns
  static constexpr float kLeastPower = 0x1p-112f, kLeastStep = 0x1p-126f;  // of finite reciprocals

  /// p_n of numbers that add up to `sum`, none larger than `largest`; NaN or infinite if `sum` is.
  static QKV_INLINE __m512 step_of(__m512 largest, __m512 sum) {
    const auto step = S::maximum(largest * S::set(1 / kMostOfTile), sum * S::set(1 / kMostOfSum));
    return S::maximum(S::set(kLeastStep), step);
  }
};

/// Up to 96 rows of Q, dO or K as integers.
class FixedPointMatrix : FixedPoint {
 public:
  Int16Pair* pairs;      // [rows / 2][row]: (O[r][d], O[r + 1][d])
  int64_t row;           // whole vectors
  float* of_rows;        // [rows], o_r
  float* of_columns;     // [row], what a product's sums are multiplied by: c_d / kOfMatrix
  bool is_fixed = true;  // else the matrix is to be multiplied in float32

  static int64_t scratch_numbers(int64_t width) {
    return kMostTerms + (kMostTerms / 2 + 1) * round_up_to_vector<float>(width);
  }

  FixedPointMatrix() = default;
  FixedPointMatrix(int64_t width, float* scratch)
      : row(round_up_to_vector<float>(width)),
        of_rows(scratch),
        of_columns(scratch + kMostTerms),
        width_(width) {
    pairs = reinterpret_cast<Int16Pair*>(of_columns + row);
  }

  /// x(r) are the rows, zeros follow up to a whole vector of them.
  template <class RowOf>
  void load(int count, RowOf x) {
    const BFloat16* rows[kMostTerms] = {};
    for (int r = 0; r < count; ++r) rows[r] = x(r);
    is_fixed = load_columns(count, rows);
    if (!is_fixed) return;
    for (int r = 0; r < count; r += S::kWidth) load_rows(r, rows + r);
    for (int64_t d = 0; d < row; d += S::kWidth) {
      S::store(of_columns + d, S::set(1 / kOfMatrix) / S::load(of_columns + d));
    }
  }

 private:
  static QKV_INLINE __m512 power_of(__m512 x) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(BFloat16::kExponent << 16)));
  }

  QKV_INLINE __m512 load(const BFloat16* x, int64_t d) const {
    if (d + S::kWidth <= width_) return S::load_bfloat16(&x[d].bits);
    return S::load_first_bfloat16(&x[d].bits, width_ - d);
  }

  /// of_columns become 1 / c_d, 1 for columns of zeros. Returns whether all are in range.
  bool load_columns(int count, const BFloat16* const* rows) {
    bool in_range = true;
    for (int64_t d = 0; d < row; d += S::kWidth) {
      auto largest = S::zero();
      for (int r = 0; r < count; ++r) largest = S::maximum(largest, power_of(load(rows[r], d)));
      const auto zero = S::equal(largest, S::zero());
      largest = S::select(zero, S::set(1.0f), largest);
      in_range &=
          !S::any_greater(S::set(kSmallest), largest) && !S::any_greater(largest, S::set(kLargest));
      S::store(of_columns + d, S::set(1.0f) / largest);
    }
    return in_range;
  }

  /// A vector of rows from `first` on, nullptr after the last one.
  void load_rows(int first, const BFloat16* const* rows) {
    const auto scaled = [&](int i, int64_t d) __attribute__((always_inline)) {
      return load(rows[i], d) * S::load(of_columns + d);
    };
    __m512 powers[S::kWidth];
    for (int i = 0; i < S::kWidth; ++i) {
      powers[i] = S::set(kLeastPower);
      for (int64_t d = 0; d < row && rows[i] != nullptr; d += S::kWidth) {
        powers[i] = S::maximum(powers[i], power_of(scaled(i, d)));
      }
    }
    transpose<float>(powers);
    auto power = powers[0];
    for (const auto& x : powers) power = S::maximum(power, x);
    S::store(of_rows + first, power);
    alignas(64) float scale[S::kWidth];
    S::store(scale, S::set(kOfMatrix) / power);
    const auto rounded = [&](int i, int64_t d) __attribute__((always_inline)) {
      if (rows[i] == nullptr) return _mm512_setzero_si512();
      return rounded_to_int16(scaled(i, d), S::set(scale[i]));
    };
    Int16Pair* to = pairs + first / 2 * row;
    for (int i = 0; i < S::kWidth; i += 2, to += row) {
      for (int64_t d = 0; d < row; d += S::kWidth) {
        Simd<Int16Pair>::store(to + d, low_halves(rounded(i, d), rounded(i + 1, d)));
      }
    }
  }

  int64_t width_;
};

template <class Scores, int kVectors>
class FixedPointGradients : FixedPoint {
 public:
  using Work = BackwardTile<Scores, kVectors>;
  using Pairs = Simd<Int16Pair>;
  static constexpr int kRows = Work::kRows;
  static constexpr int kWidth = S::kWidth;
  static_assert(kRows <= kMostTerms && kBackwardBlockKeys <= kMostTerms);
  static constexpr int64_t kMostValueDim = 128, kLeastRows = 13;

  static int64_t scratch_numbers(const Problem<float>& p) {
    return InNumbers::scratch_numbers(p) + FixedPointMatrix::scratch_numbers(p.head_dim) +
           FixedPointMatrix::scratch_numbers(p.value_dim) + 3 * kBackwardBlockKeys * kRows / 2;
  }
  /// Of so many keys of a unit.
  static int64_t numbers_of_keys(const Problem<float>& p, int64_t count) {
    return most_blocks(count) * numbers_of_block(p);
  }

  FixedPointGradients(const Work& work, float* scratch)
      : work_(work),
        p_(work.p),
        needs_query_(work.params.grad_query.data != nullptr),
        needs_key_(work.params.grad_key.data != nullptr),
        needs_value_(work.params.grad_value.data != nullptr),
        may_fix_(p_.value_dim <= kMostValueDim && rows_of_kv_head(p_) >= kLeastRows),
        in_numbers_(work, scratch) {
    scratch += InNumbers::scratch_numbers(p_);
    query_ = FixedPointMatrix(p_.head_dim, scratch);
    scratch += FixedPointMatrix::scratch_numbers(p_.head_dim);
    grad_out_ = FixedPointMatrix(p_.value_dim, scratch);
    scratch += FixedPointMatrix::scratch_numbers(p_.value_dim);
    weights_.pairs = reinterpret_cast<Int16Pair*>(scratch);
    gradients_.pairs = weights_.pairs + kBackwardBlockKeys * kRows / 2;
    gradients_in_lanes_ = gradients_.pairs + kBackwardBlockKeys * kRows / 2;
  }

  void load_keys(KeyRange keys, float* memory) {
    keys_ = keys;
    blocks_ = memory;
    for (int64_t i = 0; i < most_blocks(keys.end - keys.begin); ++i) header_of(i) = {};
  }

  /// Of a tile: when a block asks for them.
  void load_rows() { has_rows_ = has_rows_in_numbers_ = false; }

  void load_block(int64_t first_key, int count, bool partial) {
    in_numbers_.load_block(first_key, count, partial);
    first_key_ = first_key;
    count_ = count;
    fixes_value_ = fixes_key_ = fixes_query_ = false;
    if (partial || !may_fix_) return;
    if (!has_rows_) pack_rows();
    fixes_value_ = needs_value_ && grad_out_.is_fixed;
    fixes_key_ = needs_key_ && query_.is_fixed;
    fixes_query_ = needs_query_ && load_key();
    if (!fixes_value_ && !fixes_key_ && !fixes_query_) return;
    set_to_zero(largest_of_row_, kRows);
    set_to_zero(sum_of_row_, kRows);
    with_constant(work_.tile.rows == kRows, [&](auto all) {
      for (int k = 0; k < count; k += kWidth) {
        round_keys<all() != 0>(k, count - k < kWidth ? count - k : kWidth);
      }
      if (fixes_query_) round_rows<all() != 0>();
    });
  }

  void add_to_keys(KeySums<float>* of_key, KeySums<float>* of_value) {
    if (fixes_value_) add_to(*of_value, weights_, grad_out_);
    if (fixes_key_) add_to(*of_key, gradients_, query_);
    if (fixes_value_) of_value = nullptr;
    if (fixes_key_) of_key = nullptr;
    if (of_key == nullptr && of_value == nullptr) return;
    if (!has_rows_in_numbers_) in_numbers_.load_rows();
    has_rows_in_numbers_ = true;
    in_numbers_.add_to_keys(of_key, of_value);
  }

  void add_to_rows(Sums<float> grad_query) {
    if (!fixes_query_) return in_numbers_.add_to_rows(grad_query);
    if constexpr (kVectors < kBackwardVectors) {
      if (work_.query_by_rows) return add_by_rows(grad_query);
    }
    work_.seen.for_each_part([&](int first_vector, auto vectors, KeyRange) {
      constexpr int kCount = vectors();
      const int r = first_vector * kWidth;
      const Sums<float> sums = grad_query.from(0, r);
      const float *steps = step_of_row_ + r, *of_columns = key_.of_columns;
      with_constant(sums.has_any, [&](auto adds) {
        constexpr bool kAdds = adds() != 0;
        tile_product<Int16Pair, rows_together<Int16Pair, kCount>(), kCount>(
            0, p_.head_dim, (count_ + 1) / 2, key_.pairs, UnitStride{}, key_.row,
            gradients_in_lanes_ + r, kRows,
            [](int64_t, int) __attribute__((always_inline)) { return Pairs::zero(); },
            each_vector([=](int64_t d, int v, Pairs::Number x) __attribute__((always_inline)) {
              // Rounded before it is added, as a part that is summed up by itself.
              const auto product = rounded_product(of_numbers(x, S::set(of_columns[d])),
                                                   S::load(steps + v * kWidth));
              float* to = sums.first + d * sums.row + v * kWidth;
              S::store(to, kAdds ? S::load(to) + product : product);
            }));
      });
    });
  }

 private:
  using InNumbers = GradientProducts<Scores, kVectors>;

  /// W of P or dS, of which rows are summed.
  struct Tile {
    Int16Pair* pairs;  // [keys][rows / 2]
    alignas(64) float step[kBackwardBlockKeys];
  };

  /// Blocks of keys that are kept as integers for all tiles: those that begin where blocks of the
  /// head do. Others take turns at the last place.
  struct Header {
    int32_t keys;  // 0: none yet
    bool is_fixed;
  };
  static int64_t most_blocks(int64_t keys) { return keys / kBackwardBlockKeys + 3; }
  static int64_t numbers_of_block(const Problem<float>& p) {
    return kWidth + FixedPointMatrix::scratch_numbers(p.head_dim);
  }
  Header& header_of(int64_t block) {
    return *reinterpret_cast<Header*>(blocks_ + block * numbers_of_block(p_));
  }

  void pack_rows() {
    const auto rows_of = [&](const Operand<const float>& x) {
      return [rows = work_.tile.template stored_rows_in<BFloat16>(x)](int r) { return rows[r]; };
    };
    if (needs_key_) query_.load(work_.tile.rows, rows_of(p_.query));
    if (needs_value_) grad_out_.load(work_.tile.rows, rows_of(work_.params.grad_out));
    has_rows_ = true;
  }

  /// Of the block. Returns whether it is fixed.
  bool load_key() {
    const int64_t of_head = block_of_key(p_, first_key_), of_unit = block_of_key(p_, keys_.begin);
    const bool stays = begin_of_block(p_, of_head) == first_key_;
    const int64_t block = stays ? of_head - of_unit : most_blocks(keys_.end - keys_.begin) - 1;
    Header& header = header_of(block);
    key_ = FixedPointMatrix(p_.head_dim, blocks_ + block * numbers_of_block(p_) + kWidth);
    if (!stays || header.keys != count_) {
      const int64_t stride = p_.key.row_stride;
      const BFloat16* from =
          work_.tile.template stored_keys_of_head<BFloat16>(p_.key) + first_key_ * stride;
      key_.load(count_, [=](int k) { return from + k * stride; });
      header = {count_, key_.is_fixed};
    }
    return header.is_fixed;
  }

  int vectors() const { return (work_.tile.rows + kWidth - 1) / kWidth; }

  /// Numbers of a vector of rows; lanes without a row, unless the tile has all, may have anything.
  template <bool kAll>
  QKV_INLINE __m512 of_rows(const float* x, int v) const {
    const auto numbers = S::load(x + v * kWidth);
    if (kAll) return numbers;
    return S::select(first_lanes(work_.tile.rows - v * kWidth), numbers, S::zero());
  }

  /// `count` keys of the block from k on.
  template <bool kAll>
  void round_keys(int k, int count) {
    const int end = kAll ? kVectors : vectors();
    __m512 of_weights[kWidth], of_gradients[kWidth];  // sums of magnitudes in each lane
    for (int i = count; i < kWidth; ++i) of_weights[i] = of_gradients[i] = S::zero();
    // Of rows, in registers. Powers are zeros if dV or dK is not multiplied in fixed point: then
    // their sums are not used.
    __m512 sum[kVectors], largest[kVectors], of_grad_out[kVectors], of_query[kVectors];
#pragma GCC unroll 6
    for (int v = 0; v < end; ++v) {
      sum[v] = S::load(sum_of_row_ + v * kWidth);
      largest[v] = S::load(largest_of_row_ + v * kWidth);
      of_grad_out[v] = fixes_value_ ? S::load(grad_out_.of_rows + v * kWidth) : S::zero();
      of_query[v] = fixes_key_ ? S::load(query_.of_rows + v * kWidth) : S::zero();
    }
    for (int i = 0; i < count; ++i) {
      const float* weights = work_.p_tile + (k + i) * kRows;
      const float* gradients = work_.ds_tile + (k + i) * kRows;
      const auto of_key = S::set(fixes_query_ ? key_.of_rows[k + i] : 0.0f);
      // In registers: g++ keeps sums in an array, and each waits for the store of the one before.
      auto of_weight = S::zero(), of_gradient = S::zero();
#pragma GCC unroll 6
      for (int v = 0; v < end; ++v) {
        const auto gradient = magnitude(of_rows<kAll>(gradients, v));
        of_weight = of_weight + of_rows<kAll>(weights, v) * of_grad_out[v];
        of_gradient = of_gradient + gradient * of_query[v];
        const auto in_row = gradient * of_key;
        sum[v] = sum[v] + in_row;
        largest[v] = S::maximum(largest[v], in_row);
      }
      of_weights[i] = of_weight;
      of_gradients[i] = of_gradient;
    }
#pragma GCC unroll 6
    for (int v = 0; v < end; ++v) {
      S::store(sum_of_row_ + v * kWidth, sum[v]);
      S::store(largest_of_row_ + v * kWidth, largest[v]);
    }
    if (fixes_value_) {
      round_tile<kAll>(work_.p_tile, grad_out_, of_weights, k, count, weights_);
    }
    if (fixes_key_) {
      round_tile<kAll>(work_.ds_tile, query_, of_gradients, k, count, gradients_);
    }
  }

  /// sums[key] are what the magnitudes of numbers in each lane add up to.
  template <bool kAll>
  QKV_INLINE void round_tile(const float* numbers, const FixedPointMatrix& matrix,
                             __m512 (&sums)[kWidth], int k, int count, Tile& tile) {
    const int end = kAll ? kVectors : vectors();
    transpose<float>(sums);
    auto sum = sums[0], largest = sums[0];
    for (int l = 1; l < kWidth; ++l) {
      sum = sum + sums[l];
      largest = S::maximum(largest, sums[l]);
    }
    const auto step = step_of(largest, sum);
    alignas(64) float scale[kWidth];
    S::store(scale, S::set(1.0f) / step);
    S::store(tile.step + k, step);
    auto* to = reinterpret_cast<int16_t*>(tile.pairs) + k * kRows;
    numbers += k * kRows;
    for (int i = 0; i < count; ++i, to += kRows, numbers += kRows) {
      const auto of_key = S::set(scale[i]);
#pragma GCC unroll 6
      for (int v = 0; v < end; ++v) {
        const auto x = of_rows<kAll>(numbers, v) * S::load(matrix.of_rows + v * kWidth);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + v * kWidth),
                            _mm512_cvtepi32_epi16(rounded_to_int16(x, of_key)));
      }
    }
  }

  /// dS for dQ.
  template <bool kAll>
  void round_rows() {
    for (int v = 0; v < vectors(); ++v) {
      const int r = v * kWidth;
      const auto step = step_of(S::load(largest_of_row_ + r), S::load(sum_of_row_ + r));
      const auto scale = S::set(1.0f) / step;
      S::store(step_of_row_ + r, step);
      const auto rounded = [&](int k) __attribute__((always_inline)) {
        const auto ds = of_rows<kAll>(work_.ds_tile + k * kRows, v);
        return rounded_to_int16(ds * S::set(key_.of_rows[k]), scale);
      };
      Int16Pair* to = gradients_in_lanes_ + r;
      int k = 0;
      for (; k + 1 < count_; k += 2, to += kRows) {
        Pairs::store(to, low_halves(rounded(k), rounded(k + 1)));
      }
      if (k < count_) Pairs::store(to, low_halves(rounded(k), _mm512_setzero_si512()));
    }
  }

  void add_to(KeySums<float>& to, const Tile& tile, const FixedPointMatrix& matrix) const {
    const Sums<float> sums = to.to_add_to(first_key_, first_key_ + count_);
    for_each_columns<Int16Pair>(to.width, [&](int64_t d, auto vectors, auto together) {
      constexpr int kCount = vectors(), kTogether = together();
      const Sums<float> columns = sums.from(0, d);
      const float *steps = tile.step, *of_columns = matrix.of_columns + d;
      with_constant(sums.has_any, [&](auto adds) {
        constexpr bool kAdds = adds() != 0;
        tile_product<Int16Pair, kTogether, kCount>(
            0, count_, (work_.tile.rows + 1) / 2, tile.pairs, kRows / 2, UnitStride{},
            matrix.pairs + d, matrix.row,
            [](int64_t, int) __attribute__((always_inline)) { return Pairs::zero(); },
            each_vector([=](int64_t n, int v, Pairs::Number x) __attribute__((always_inline)) {
              const auto product = of_numbers(x, S::load(of_columns + v * kWidth));
              float* to = columns.first + n * columns.row + v * kWidth;
              const auto step = S::set(steps[n]);
              S::store(to, kAdds ? S::fma(product, step, S::load(to)) : product * step);
            }));
      });
    });
  }

  /// Rounded as above.
  void add_by_rows(Sums<float> grad_query) const {
    for_each_columns<Int16Pair>(
        round_up_to_vector<float>(p_.head_dim), [&](int64_t d, auto vectors, auto together) {
          constexpr int kCount = vectors(), kTogether = together();
          const Sums<float> columns = grad_query.from(0, d);
          const float *steps = step_of_row_, *of_columns = key_.of_columns + d;
          with_constant(columns.has_any, [&](auto adds) {
            constexpr bool kAdds = adds() != 0;
            tile_product<Int16Pair, kTogether, kCount>(
                0, work_.tile.rows, (count_ + 1) / 2, gradients_in_lanes_, UnitStride{}, kRows,
                key_.pairs + d, key_.row,
                [](int64_t, int) __attribute__((always_inline)) { return Pairs::zero(); },
                each_vector([=](int64_t r, int v, Pairs::Number x) __attribute__((always_inline)) {
                  const auto product = rounded_product(
                      of_numbers(x, S::load(of_columns + v * kWidth)), S::set(steps[r]));
                  float* to = columns.first + r * columns.row + v * kWidth;
                  S::store(to, kAdds ? S::load(to) + product : product);
                }));
          });
        });
  }

  static QKV_INLINE __m512 of_numbers(Pairs::Number sum, __m512 of_column) {
    return __builtin_convertvector(sum, __m512) * of_column;
  }

  const Work& work_;
  const Problem<float>& p_;
  bool needs_query_, needs_key_, needs_value_;
  bool may_fix_;  // blocks of which all pairs are kept
  InNumbers in_numbers_;
  bool has_rows_ = false, has_rows_in_numbers_ = false;  // of the tile
  FixedPointMatrix query_, grad_out_;
  KeyRange keys_{0, 0};      // of the unit
  float* blocks_ = nullptr;  // of them
  FixedPointMatrix key_;     // of the block
  int64_t first_key_ = 0;
  int count_ = 0;
  bool fixes_query_ = false, fixes_key_ = false, fixes_value_ = false;  // of the block
  Tile weights_, gradients_;
  Int16Pair* gradients_in_lanes_;            // [keys / 2][rows]
  alignas(64) float largest_of_row_[kRows];  // of dS, times the power of the key
  alignas(64) float sum_of_row_[kRows];
  alignas(64) float step_of_row_[kRows];
};

}  // namespace qkv::kernels::QKV_ISA
