#pragma once

#include "kernels/cpu/amx_blocks.inc.h"
#include "kernels/cpu/half_tile.inc.h"

// What derivatives by AMX are cut into, and how keys and rows are packed for them.
//
// 32 keys and 32 rows, a "square", are four tiles of S. Depths of products are 32 keys or rows as
// well, in pairs: keys 2k and 2k + 1; but rows r and r + 16, which are the same lane of two
// vectors.

namespace qkv::kernels::QKV_ISA {

constexpr int kSquare = 32;

inline int64_t amx_depths(int64_t width) { return (width + kTileDepth - 1) / kTileDepth; }
inline int64_t amx_columns(int64_t width) { return (width + kTileRows - 1) / kTileRows; }

/// 32 rows and keys of a tile, from the bits of pairs that are kept: `row_bytes` for 8 keys.
inline TileState state_of_square(const uint8_t* bits, int64_t row_bytes, int keys) {
  auto any = _mm256_setzero_si256(), all = _mm256_set1_epi8(-1);
  for (int k = 0; k < keys; k += 8, bits += row_bytes) {
    const auto kept = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits));
    const auto inside = _mm256_set1_epi8(static_cast<char>(bits_in_range(0, keys - k)));
    any = _mm256_or_si256(any, _mm256_and_si256(kept, inside));
    all = _mm256_and_si256(all, _mm256_or_si256(kept, ~inside));
  }
  if (_mm256_testz_si256(any, any)) return TileState::kEmpty;
  return _mm256_movepi8_mask(_mm256_cmpeq_epi8(all, _mm256_set1_epi8(-1))) == ~__mmask32(0)
             ? TileState::kFull
             : TileState::kPartial;
}

/// `count` keys as tiles A [keys / 16][depths].
inline void pack_key_lines(const BFloat16* keys, int64_t stride, int64_t count, int64_t width,
                           BFloat16* to) {
  for (int64_t k = 0; k < (count + kSquare - 1) / kSquare * kSquare; k += kTileRows) {
    const BFloat16* rows[kTileRows];
    for (int l = 0; l < kTileRows; ++l) rows[l] = k + l < count ? keys + (k + l) * stride : nullptr;
    pack_lines(rows, width, to);
    to += amx_depths(width) * kTileRows * kTileDepth;
  }
}

/// The same as tiles A [keys / 32][columns], which leave out what is not finite; `poisoned` says
/// of which 32 keys.
inline void pack_key_columns(const BFloat16* keys, int64_t stride, int64_t count, int64_t width,
                             BFloat16* to, uint8_t* poisoned) {
  const auto row = [&](int64_t k) { return k < count ? keys + k * stride : nullptr; };
  for (int64_t k = 0; k < count; k += kSquare) {
    const BFloat16* first[kTileRows];
    const BFloat16* second[kTileRows];
    for (int l = 0; l < kTileRows; ++l) {
      first[l] = row(k + 2 * l);
      second[l] = row(k + 2 * l + 1);
    }
    *poisoned++ = !pack_columns(first, second, width, to);
    to += amx_columns(width) * kTileRows * kTileDepth;
  }
}

/// A tile of rows of x as tiles B: transposed [rows / 16][depths] and, unless that is nullptr,
/// [rows / 32][columns], which leave out what is not finite. False if something was not.
template <int kRows>
inline bool pack_rows(const RowTile<kRows>& tile, const Operand<const float>& x, int64_t width,
                      BFloat16* columns, BFloat16* rows) {
  constexpr int64_t kTile = kTileRows * kTileDepth;
  const auto rows_of_x = tile.template stored_rows_in<BFloat16>(x);
  bool all_finite = true;
  for (int g = 0; g * kSquare < tile.rows; ++g) {
    const BFloat16* halves[2][kTileRows];
    for (int l = 0; l < kSquare; ++l) {
      const int r = g * kSquare + l;
      halves[l / kTileRows][l % kTileRows] = r < tile.rows ? rows_of_x[r] : nullptr;
    }
    for (int half = 0; half < 2; ++half) {
      pack_pairs_of_columns(halves[half], width, 1,
                            columns + (2 * g + half) * amx_depths(width) * kTile);
    }
    if (rows == nullptr) continue;
    all_finite &=
        pack_pairs_of_rows(halves[0], halves[1], width, rows + g * amx_columns(width) * kTile);
  }
  return all_finite;
}

}  // namespace qkv::kernels::QKV_ISA
