#pragma once

#include "kernels/band.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/transpose.inc.h"
#include "kernels/half.h"

// Which pairs (query row, key) of a tile are kept, and what the additive mask puts on them.
//
// Band, bool mask, float mask (-inf drops a pair) and key mask all end in one bit a pair:
//
//     bits[g][r], bit b  =  keep(row r, key first_key + 8·g + b)      0 in lanes without a row
//
// so a tile is known to be empty (skipped: K and V are not even read), full (no masking at all) or
// partial before its scores are computed.

namespace qkv::kernels::QKV_ISA {

enum class TileState { kEmpty, kPartial, kFull };

/// Bits begin <= b < end of a word; begin and end may lie outside of it.
inline uint64_t bits_in_range(int64_t begin, int64_t end) {
  const uint64_t from = begin <= 0 ? ~uint64_t{0} : begin >= 64 ? 0 : ~uint64_t{0} << begin;
  const uint64_t to = end >= 64 ? ~uint64_t{0} : end <= 0 ? 0 : ~uint64_t{0} >> (64 - end);
  return from & to;
}

/// Up to 64 bools to bits, byte b to bit b; bits after them may be anything.
inline uint64_t bits_of_bools(const uint8_t* bools, int64_t stride, int count) {
  if (stride == 1 && count == 64) return bits_of_64_bools(bools);
  if (stride == 0) return bools[0] != 0 ? ~uint64_t{0} : 0;
  uint64_t bits = 0;
  int b = 0;
  for (; stride == 1 && b + 8 <= count; b += 8) {
    uint64_t x;
    __builtin_memcpy(&x, bools + b, 8);
    const uint64_t low = 0x7f7f7f7f7f7f7f7full;
    x = (((x & low) + low) | x) >> 7 & 0x0101010101010101ull;  // any non-zero byte is true
    bits |= (x * 0x0102040810204080ull >> 56) << b;
  }
  for (; b < count; ++b) bits |= static_cast<uint64_t>(bools[b * stride] != 0) << b;
  return bits;
}

template <class T, int kRows>
struct MaskTile {
  uint8_t* bits;  // [ceil(keys / 8)][kRows]
  T* bias;        // [keys][kRows], written only for a float mask

  static bool has_bias(const Problem<T>& problem) {
    return problem.attn_mask.type != MaskType::kNone && problem.attn_mask.type != MaskType::kBool;
  }

  /// Whether pair (key k, row r) of what was loaded, with this result, is kept.
  bool keeps(TileState state, int k, int r) const {
    if (state != TileState::kPartial) return state == TileState::kFull;
    return (bits[k / 8 * kRows + r] >> (k % 8) & 1) != 0;
  }

  QKV_ONE_COPY TileState load(const Problem<T>& problem, const RowTile<kRows>& tile,
                              int64_t first_key, int keys) {
    const bool band_is_full =
        keys_of_all(problem.band, tile.first_query(), tile.last_query(), problem.keys)
            .contains({first_key, first_key + keys});
    const bool has_mask = problem.attn_mask.type != MaskType::kNone;
    if (band_is_full && !has_mask && problem.key_mask.data == nullptr) return TileState::kFull;

    uint64_t any = 0, lost = 0;
    for (int k = 0; k < keys; k += kWordKeys) {
      const int count = keys - k < kWordKeys ? keys - k : kWordKeys;
      const int64_t first = first_key + k;
      const uint64_t inside = bits_in_range(0, count);
      const uint64_t kept_by_all =
          problem.key_mask.data == nullptr
              ? inside
              : bits_of_key_mask(problem.key_mask, tile, first, count) & inside;
      uint64_t kept[kRows] = {};
      for (int r = 0; r < tile.rows; ++r) {
        kept[r] = kept_by_all;
        if (band_is_full) continue;
        const KeyRange range = keys_of_query(problem.band, tile.query[r], problem.keys);
        kept[r] &= bits_in_range(range.begin - first, range.end - first);
      }
      and_mask(problem.attn_mask, tile, first, count, kept, bias + k * kRows);
      for (int r = 0; r < tile.rows; ++r) {
        any |= kept[r];
        lost |= inside & ~kept[r];
      }
      for (int b = 0; b < count; b += 8) {
        uint8_t* bytes = bits + (k + b) / 8 * kRows;
        for (int r = 0; r < kRows; ++r) bytes[r] = static_cast<uint8_t>(kept[r] >> b);
      }
    }
    return any == 0 ? TileState::kEmpty : lost == 0 ? TileState::kFull : TileState::kPartial;
  }

  /// The same of few rows, one after the other: bias[row][most_keys], and bits of these rows only.
  QKV_ONE_COPY TileState load_few_rows(const Problem<T>& problem, const RowTile<kRows>& tile,
                                       int64_t first_key, int keys, int most_keys) {
    const bool has_masks =
        problem.attn_mask.type != MaskType::kNone || problem.key_mask.data != nullptr;
    if (!has_masks && keys_of_all(problem.band, tile.first_query(), tile.last_query(), problem.keys)
                          .contains({first_key, first_key + keys})) {
      return TileState::kFull;
    }

    uint64_t any = 0, lost = 0;
    for (int k = 0; k < keys; k += kWordKeys) {
      const int count = keys - k < kWordKeys ? keys - k : kWordKeys;
      const int64_t first = first_key + k;
      const uint64_t inside = bits_in_range(0, count);
      const uint64_t kept_by_all =
          problem.key_mask.data == nullptr
              ? inside
              : bits_of_key_mask(problem.key_mask, tile, first, count) & inside;
      for (int r = 0; r < tile.rows; ++r) {
        const KeyRange seen = keys_of_query(problem.band, tile.query[r], problem.keys);
        const uint64_t kept =
            kept_by_all & bits_in_range(seen.begin - first, seen.end - first) &
            bits_of_row(problem.attn_mask, tile, r, first, count, bias + r * most_keys + k);
        any |= kept;
        lost |= inside & ~kept;
        for (int b = 0; b < count; b += 8) {
          bits[(k + b) / 8 * kRows + r] = static_cast<uint8_t>(kept >> b);
        }
      }
    }
    return any == 0 ? TileState::kEmpty : lost == 0 ? TileState::kFull : TileState::kPartial;
  }

 private:
  static constexpr int kWordKeys = 64;           // of a row, collected in a word
  static constexpr int kFewestRowsOfSquare = 4;  // the rest of which are zeros
  // Rows of a mask are far apart, and no hardware looks ahead in so many at once.
  static constexpr int kKeysAhead = 128;

  static uint64_t bits_of_key_mask(const KeyMask& mask, const RowTile<kRows>& tile,
                                   int64_t first_key, int keys) {
    return bits_of_bools(
        mask.data + tile.batch.offset(mask.batch_stride) + first_key * mask.column_stride,
        mask.column_stride, keys);
  }

  /// The pairs of row r that the mask keeps. A float mask is written to `to`, in whole vectors.
  static uint64_t bits_of_row(const Mask& mask, const RowTile<kRows>& tile, int r,
                              int64_t first_key, int keys, T* to) {
    switch (mask.type) {
      case MaskType::kNone:
        break;
      case MaskType::kBool:
        return bits_of_bools(mask_row<uint8_t>(mask, tile, r, first_key), mask.column_stride, keys);
      case MaskType::kFloat32:
        return bits_of_float_row<float>(mask, tile, r, first_key, keys, to);
      case MaskType::kFloat64:
        return bits_of_float_row<double>(mask, tile, r, first_key, keys, to);
      case MaskType::kBFloat16:
        return bits_of_float_row<BFloat16>(mask, tile, r, first_key, keys, to);
      case MaskType::kFloat16:
        return bits_of_float_row<Float16>(mask, tile, r, first_key, keys, to);
    }
    return ~uint64_t{0};
  }

  template <class M>
  static uint64_t bits_of_float_row(const Mask& mask, const RowTile<kRows>& tile, int r,
                                    int64_t first_key, int keys, T* to) {
    using S = Simd<T>;
    const M* row = mask_row<M>(mask, tile, r, first_key);
    const auto dropped = S::set(-static_cast<T>(__builtin_inff()));
    uint64_t lost = 0;
    for (int k = 0; k < keys; k += S::kWidth) {
      M apart[S::kWidth] = {};
      const M* from = mask.column_stride == 1 ? row + k : apart;
      for (int l = 0; from == apart && l < S::kWidth && k + l < keys; ++l) {
        apart[l] = row[(k + l) * mask.column_stride];
      }
      const auto x = load_first_converted<T>(from, keys - k < S::kWidth ? keys - k : S::kWidth);
      lost |= static_cast<uint64_t>(S::bits_of(S::equal(x, dropped))) << k;
      S::store(to + k, x);
    }
    return ~lost;
  }

  /// Pairs that the mask drops leave `kept`, one word a row. A float mask is written to `to`.
  static void and_mask(const Mask& mask, const RowTile<kRows>& tile, int64_t first_key, int keys,
                       uint64_t* kept, T* to) {
    switch (mask.type) {
      case MaskType::kNone:
        return;
      case MaskType::kBool:
        return and_bool_mask(mask, tile, first_key, keys, kept);
      case MaskType::kFloat32:
        return and_float_mask<float>(mask, tile, first_key, keys, kept, to);
      case MaskType::kFloat64:
        return and_float_mask<double>(mask, tile, first_key, keys, kept, to);
      case MaskType::kBFloat16:
        return and_float_mask<BFloat16>(mask, tile, first_key, keys, kept, to);
      case MaskType::kFloat16:
        return and_float_mask<Float16>(mask, tile, first_key, keys, kept, to);
    }
  }

  template <class M>
  static const M* mask_row(const Mask& mask, const RowTile<kRows>& tile, int r, int64_t first_key) {
    return static_cast<const M*>(mask.data) + tile.batch.offset(mask.batch_stride) +
           tile.head[r] * mask.head_stride + tile.query[r] * mask.row_stride +
           first_key * mask.column_stride;
  }

  static void and_bool_mask(const Mask& mask, const RowTile<kRows>& tile, int64_t first_key,
                            int keys, uint64_t* kept) {
    for (int r = 0; r < tile.rows; ++r) {
      const uint8_t* row = mask_row<uint8_t>(mask, tile, r, first_key);
      __builtin_prefetch(row + kKeysAhead * mask.column_stride, 0, 2);
      kept[r] &= bits_of_bools(row, mask.column_stride, keys);
    }
  }

  /// Squares of the mask are read by the vector and transposed in registers; one of very few rows,
  /// or a mask whose keys lie apart, by the number.
  template <class M>
  static void and_float_mask(const Mask& mask, const RowTile<kRows>& tile, int64_t first_key,
                             int keys, uint64_t* kept, T* to) {
    constexpr int kWidth = Simd<T>::kWidth;
    if (mask.column_stride == 0)
      return and_numbers_of_rows<M>(mask, tile, first_key, keys, kept, to);
    const int whole = keys / kWidth * kWidth;
    int r = 0;
    for (; r < tile.rows; r += kWidth) {
      if (mask.column_stride != 1 || tile.rows - r < kFewestRowsOfSquare) {
        and_numbers<M>(mask, tile, r, first_key, keys, kept, to);
        continue;
      }
      const M* from[kWidth];
      for (int l = 0; l < kWidth; ++l) {
        from[l] = r + l < tile.rows ? mask_row<M>(mask, tile, r + l, first_key) : nullptr;
      }
      const bool has_all = from[kWidth - 1] != nullptr;
      for (int k = 0; k < whole; k += kWidth) {
        T* square = to + k * kRows + r;
        has_all ? and_square(from, k, kept + r, square)
                : and_part_of_square(from, k, kWidth, kept + r, square);
      }
      if (whole < keys) {
        and_part_of_square(from, whole, keys - whole, kept + r, to + whole * kRows + r);
      }
    }
    for (; r < kRows; r += kWidth) {
      for (int k = 0; k < keys; ++k) Simd<T>::store(to + k * kRows + r, Simd<T>::zero());
    }
  }

  /// Of a mask that is the same for all keys.
  template <class M>
  static void and_numbers_of_rows(const Mask& mask, const RowTile<kRows>& tile, int64_t first_key,
                                  int keys, uint64_t* kept, T* to) {
    using S = Simd<T>;
    alignas(64) T numbers[kRows] = {};
    for (int r = 0; r < tile.rows; ++r) {
      numbers[r] = static_cast<T>(*mask_row<M>(mask, tile, r, first_key));
      if (numbers[r] == -static_cast<T>(__builtin_inff())) kept[r] = 0;
    }
    for (int k = 0; k < keys; ++k) {
      for (int r = 0; r < kRows; r += S::kWidth) S::store(to + k * kRows + r, S::load(numbers + r));
    }
  }

  /// As many keys, from the k-th on, as rows.
  template <class M>
  static void and_square(const M* const (&from)[Simd<T>::kWidth], int k, uint64_t* kept, T* to) {
    using S = Simd<T>;
    constexpr int kWidth = S::kWidth;
    const auto dropped = S::set(-static_cast<T>(__builtin_inff()));
    typename S::Number square[kWidth];
    auto lowest = S::zero();
#pragma GCC unroll 16
    for (int l = 0; l < kWidth; ++l) {
      __builtin_prefetch(from[l] + k + kKeysAhead, 0, 2);
      __builtin_prefetch(from[l] + k + 2 * kWidth, 0, 3);  // the square after the next, from there
      square[l] = load_converted<T>(from[l] + k);
      lowest = S::minimum(square[l], lowest);
    }
    // Neither -inf, nor a NaN that may hide one.
    constexpr unsigned kAll = (1u << kWidth) - 1;
    if (S::bits_of(S::less(dropped, lowest)) != kAll) drop_minus_infinity(square, k, kept);
    transpose<T>(square);
#pragma GCC unroll 16
    for (int c = 0; c < kWidth; ++c) S::store(to + c * kRows, square[c]);
  }

  /// Of rows that there are, others being nullptr, and so many keys: zeros for the rest of a
  /// square, of whose keys none is written.
  template <class M>
  QKV_ONE_COPY static void and_part_of_square(const M* const (&from)[Simd<T>::kWidth], int k,
                                              int keys, uint64_t* kept, T* to) {
    using S = Simd<T>;
    typename S::Number square[S::kWidth];
    for (int l = 0; l < S::kWidth; ++l) {
      square[l] = from[l] == nullptr ? S::zero() : load_first_converted<T>(from[l] + k, keys);
    }
    drop_minus_infinity(square, k, kept);
    transpose<T>(square);
    for (int c = 0; c < keys; ++c) S::store(to + c * kRows, square[c]);
  }

  /// What is -inf, of keys from the k-th on, is not kept.
  static QKV_INLINE void drop_minus_infinity(
      const typename Simd<T>::Number (&square)[Simd<T>::kWidth], int k, uint64_t* kept) {
    const auto dropped = Simd<T>::set(-static_cast<T>(__builtin_inff()));
    for (int l = 0; l < Simd<T>::kWidth; ++l) {
      uint64_t lost = Simd<T>::bits_of(Simd<T>::equal(square[l], dropped));
      asm("" : "+r"(lost));  // else g++ 12.2 makes a vector of these words that is wrong
      kept[l] &= ~(lost << k);
    }
  }

  /// A vector of rows, from `first_row` on.
  template <class M>
  static void and_numbers(const Mask& mask, const RowTile<kRows>& tile, int first_row,
                          int64_t first_key, int keys, uint64_t* kept, T* to) {
    constexpr int kWidth = Simd<T>::kWidth;
    const T dropped = -static_cast<T>(__builtin_inff());
    for (int k = 0; k < keys; ++k) Simd<T>::store(to + k * kRows + first_row, Simd<T>::zero());
    for (int r = first_row; r < first_row + kWidth && r < tile.rows; ++r) {
      const M* row = mask_row<M>(mask, tile, r, first_key);
      for (int k = 0; k < keys; ++k) {
        const auto x = static_cast<T>(row[k * mask.column_stride]);
        kept[r] &= ~(static_cast<uint64_t>(x == dropped) << k);
        to[k * kRows + r] = x;
      }
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
