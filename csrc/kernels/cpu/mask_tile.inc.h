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

/// Bits begin <= b < end of a byte; begin and end may lie outside of it.
inline uint8_t bits_in_range(int64_t begin, int64_t end) {
  if (begin >= 8 || end <= 0 || begin >= end) return 0;
  const unsigned from = begin <= 0 ? 0xffu : 0xffu << begin;
  const unsigned to = end >= 8 ? 0xffu : 0xffu >> (8 - end);
  return static_cast<uint8_t>(from & to);
}

/// Up to 8 bools to bits, byte b to bit b.
inline uint8_t bits_of_bools(const uint8_t* bools, int64_t stride, int count) {
  if (stride == 1 && count == 8) {
    uint64_t x;
    __builtin_memcpy(&x, bools, 8);
    const uint64_t low = 0x7f7f7f7f7f7f7f7full;
    x = (((x & low) + low) | x) >> 7 & 0x0101010101010101ull;  // any non-zero byte is true
    return static_cast<uint8_t>(x * 0x0102040810204080ull >> 56);
  }
  unsigned bits = 0;
  for (int b = 0; b < count; ++b) bits |= static_cast<unsigned>(bools[b * stride] != 0) << b;
  return static_cast<uint8_t>(bits);
}

template <class T, int kRows>
struct MaskTile {
  uint8_t* bits;  // [ceil(keys / 8)][kRows]
  T* bias;        // [keys][kRows], written only for a float mask

  static bool has_bias(const Problem<T>& problem) {
    return problem.attn_mask.type != MaskType::kNone && problem.attn_mask.type != MaskType::kBool;
  }

  TileState load(const Problem<T>& problem, const RowTile<kRows>& tile, int64_t first_key,
                 int keys) {
    const KeyRange block{first_key, first_key + keys};
    const bool band_is_full =
        keys_of_all(problem.band, tile.first_query(), tile.last_query(), problem.keys)
            .contains(block);
    const bool has_mask = problem.attn_mask.type != MaskType::kNone;
    if (band_is_full && !has_mask && problem.key_mask.data == nullptr) return TileState::kFull;

    const int bytes = (keys + 7) / 8;
    if (band_is_full) {
      for (int g = 0; g < bytes; ++g) {
        __builtin_memset(bits + g * kRows, 0xff, static_cast<size_t>(tile.rows));
        __builtin_memset(bits + g * kRows + tile.rows, 0, static_cast<size_t>(kRows - tile.rows));
      }
    } else {
      load_band(problem, tile, first_key, bytes);
    }
    if (problem.key_mask.data != nullptr) and_key_mask(problem.key_mask, tile, first_key, keys);
    switch (problem.attn_mask.type) {
      case MaskType::kNone:
        break;
      case MaskType::kBool:
        and_bool_mask(problem.attn_mask, tile, first_key, keys);
        break;
      case MaskType::kFloat32:
        load_float_mask<float>(problem.attn_mask, tile, first_key, keys);
        break;
      case MaskType::kFloat64:
        load_float_mask<double>(problem.attn_mask, tile, first_key, keys);
        break;
      case MaskType::kBFloat16:
        load_float_mask<BFloat16>(problem.attn_mask, tile, first_key, keys);
        break;
      case MaskType::kFloat16:
        load_float_mask<Float16>(problem.attn_mask, tile, first_key, keys);
        break;
    }
    return state(tile.rows, keys);
  }

 private:
  using size_t = decltype(sizeof(0));

  void load_band(const Problem<T>& problem, const RowTile<kRows>& tile, int64_t first_key,
                 int bytes) {
    for (int r = 0; r < tile.rows; ++r) {
      const KeyRange range = keys_of_query(problem.band, tile.query[r], problem.keys);
      for (int g = 0; g < bytes; ++g) {
        const int64_t origin = first_key + 8 * g;
        bits[g * kRows + r] = bits_in_range(range.begin - origin, range.end - origin);
      }
    }
    for (int r = tile.rows; r < kRows; ++r) {
      for (int g = 0; g < bytes; ++g) bits[g * kRows + r] = 0;
    }
  }

  void and_key_mask(const KeyMask& mask, const RowTile<kRows>& tile, int64_t first_key, int keys) {
    const uint8_t* of_batch =
        mask.data + tile.batch.offset(mask.batch_stride) + first_key * mask.column_stride;
    for (int k = 0; k < keys; k += 8) {
      const uint8_t kept = bits_of_bools(of_batch + k * mask.column_stride, mask.column_stride,
                                         keys - k < 8 ? keys - k : 8);
      for (int r = 0; r < kRows; ++r) bits[k / 8 * kRows + r] &= kept;
    }
  }

  template <class M>
  static const M* mask_row(const Mask& mask, const RowTile<kRows>& tile, int r, int64_t first_key) {
    return static_cast<const M*>(mask.data) + tile.batch.offset(mask.batch_stride) +
           tile.head[r] * mask.head_stride + tile.query[r] * mask.row_stride +
           first_key * mask.column_stride;
  }

  void and_bool_mask(const Mask& mask, const RowTile<kRows>& tile, int64_t first_key, int keys) {
    for (int r = 0; r < tile.rows; ++r) {
      const uint8_t* row = mask_row<uint8_t>(mask, tile, r, first_key);
      int k = 0;
      for (; mask.column_stride == 1 && k + 64 <= keys; k += 64) {
        const uint64_t kept = bits_of_64_bools(row + k);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
          bits[(k / 8 + g) * kRows + r] &= static_cast<uint8_t>(kept >> (8 * g));
        }
      }
      for (; k < keys; k += 8) {
        bits[k / 8 * kRows + r] &= bits_of_bools(row + k * mask.column_stride, mask.column_stride,
                                                 keys - k < 8 ? keys - k : 8);
      }
    }
  }

  /// Squares of the mask are read by the vector and transposed in registers, the rest by the
  /// number.
  template <class M>
  void load_float_mask(const Mask& mask, const RowTile<kRows>& tile, int64_t first_key, int keys) {
    using S = Simd<T>;
    constexpr int kWidth = S::kWidth, kSquare = kWidth < 8 ? 8 : kWidth;
    const int rows = mask.column_stride == 1 ? tile.rows / kWidth * kWidth : 0;
    const int whole = keys / kSquare * kSquare;
    for (int r = 0; r < rows; r += kWidth) {
      const M* from[kWidth];
      for (int l = 0; l < kWidth; ++l) from[l] = mask_row<M>(mask, tile, r + l, first_key);
      for (int k = 0; k < whole; k += kSquare) load_square(from, r, k);
    }
    load_rest<M>(mask, tile, 0, rows, first_key, whole, keys);
    load_rest<M>(mask, tile, rows, tile.rows, first_key, 0, keys);
    for (int k = 0; k < keys; ++k) {
      for (int r = tile.rows; r < kRows; ++r) bias[k * kRows + r] = T(0);
    }
  }

  /// As many rows as a vector has lanes, as many keys but at least 8.
  template <class M>
  void load_square(const M* const (&from)[Simd<T>::kWidth], int first_row, int first_key) {
    using S = Simd<T>;
    constexpr int kWidth = S::kWidth;
    const auto dropped = S::set(-static_cast<T>(__builtin_inff()));
    unsigned lost[kWidth] = {};
    for (int k = 0; k < (kWidth < 8 ? 8 : kWidth); k += kWidth) {
      typename S::Number square[kWidth];
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) {
        square[l] = load_converted<T>(from[l] + first_key + k);
        lost[l] |= S::bits_of(S::equal(square[l], dropped)) << k;
      }
      transpose<T>(square);
#pragma GCC unroll 16
      for (int c = 0; c < kWidth; ++c) {
        S::store(bias + (first_key + k + c) * kRows + first_row, square[c]);
      }
    }
    for (int k = 0; k < kWidth; k += 8) {
      uint8_t* bytes = bits + (first_key + k) / 8 * kRows + first_row;
      for (int l = 0; l < kWidth; ++l) bytes[l] &= static_cast<uint8_t>(~(lost[l] >> k));
    }
  }

  template <class M>
  void load_rest(const Mask& mask, const RowTile<kRows>& tile, int first_row, int end_row,
                 int64_t first_key, int begin, int keys) {
    const T dropped = -static_cast<T>(__builtin_inff());
    for (int r = first_row; r < end_row; ++r) {
      const M* row = mask_row<M>(mask, tile, r, first_key);
      for (int k = begin; k < keys; k += 8) {
        unsigned kept = 0;
        const int count = keys - k < 8 ? keys - k : 8;
        for (int b = 0; b < count; ++b) {
          const auto x = static_cast<T>(row[(k + b) * mask.column_stride]);
          kept |= static_cast<unsigned>(x != dropped) << b;
          bias[(k + b) * kRows + r] = x;
        }
        bits[k / 8 * kRows + r] &= static_cast<uint8_t>(kept);
      }
    }
  }

  TileState state(int rows, int keys) const {
    // Of each row, so that the compiler sees vectors of bytes.
    uint8_t all_of[kRows], any_of[kRows];
    __builtin_memset(all_of, 0xff, kRows);
    __builtin_memset(any_of, 0, kRows);
    for (int k = 0; k < keys; k += 8) {
      const uint8_t inside = bits_in_range(0, keys - k);
      const uint8_t* bytes = bits + k / 8 * kRows;
      for (int r = 0; r < kRows; ++r) {
        all_of[r] &= bytes[r] | static_cast<uint8_t>(~inside);
        any_of[r] |= bytes[r] & inside;
      }
    }
    unsigned all = 0xff, any = 0;
    for (int r = 0; r < rows; ++r) {
      all &= all_of[r];
      any |= any_of[r];
    }
    return any == 0 ? TileState::kEmpty : all == 0xff ? TileState::kFull : TileState::kPartial;
  }
};

}  // namespace qkv::kernels::QKV_ISA
