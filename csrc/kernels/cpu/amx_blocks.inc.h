#pragma once

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/tile_product.inc.h"

// Matrices cut into tiles of AMX that each lie in one piece, 16 lines of 64 bytes, and products of
// two by two of them:
//
//     C[2 · 16][2 · 16] (+)= sum over steps of A[2 · 16][32] · B[16][2 · 16]
//
// One of A and B may be in two parts, to be multiplied one after the other. Four tiles hold C, two
// the operand that stays and one that which changes: loads of tiles take longer than their products
// where the core is shared.

namespace qkv::kernels::QKV_ISA {

constexpr int64_t kTileBytes = 1024;

/// Hands out pieces of memory; or only counts them, if that is nullptr.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  void take(T*& piece, int64_t tiles) {
    piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += tiles * kTileBytes;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

/// Operand tiles of a product. That of row (or column) i, part h and step s is
/// data + i · next + h · part + s · step, in tiles.
struct TileOperand {
  const void* data;
  int64_t next;
  int64_t part;
  int64_t step;

  QKV_INLINE const void* tile(int i, int h, int64_t s) const {
    return static_cast<const char*>(data) + (i * next + h * part + s * step) * kTileBytes;
  }
};

/// Tiles of sums: tile (i, j) begins at data + i · down + j · right.
struct TileSums {
  float* data;
  int64_t row;
  int64_t down;
  int64_t right;

  QKV_INLINE float* tile(int i, int j) const { return data + i * down + j * right; }
};

/// The steps of a product: the first, or those that were added.
class Steps {
 public:
  Steps() = default;
  explicit Steps(int64_t count) : count_(count), all_(true) {}

  void add(int step) { added_[count_++] = static_cast<int8_t>(step); }
  QKV_INLINE int64_t count() const { return count_; }
  QKV_INLINE int64_t operator[](int64_t i) const { return all_ ? i : added_[i]; }

 private:
  int64_t count_ = 0;
  bool all_ = false;
  int8_t added_[8];
};

enum class InParts { kNone, kLeft, kRight };

template <int kDown, int kRight, bool kAdds, InParts kInParts>
QKV_INLINE void multiply_tiles(const Steps& steps, TileOperand a, TileOperand b, TileSums c) {
  constexpr int kParts = kInParts == InParts::kNone ? 1 : 2;
  const int64_t c_bytes = c.row * int64_t{sizeof(float)};
  const auto start = [&](auto tile, int i, int j) __attribute__((always_inline)) {
    if constexpr (kAdds) {
      load_tile<tile()>(c.tile(i, j), c_bytes);
    } else {
      set_tile_to_zero<tile()>();
    }
  };
  start(Constant<0>{}, 0, 0);
  if constexpr (kRight > 1) start(Constant<1>{}, 0, 1);
  if constexpr (kDown > 1) start(Constant<2>{}, 1, 0);
  if constexpr (kDown > 1 && kRight > 1) start(Constant<3>{}, 1, 1);
  for (int64_t x = 0; x < steps.count(); ++x) {
    const int64_t s = steps[x];
    if constexpr (kInParts == InParts::kRight) {
      load_tile<4>(a.tile(0, 0, s), 64);
      if constexpr (kDown > 1) load_tile<5>(a.tile(1, 0, s), 64);
#pragma GCC unroll 2
      for (int h = 0; h < kParts; ++h) {
        load_tile<6>(b.tile(0, h, s), 64);
        multiply_add_tiles<0, 4, 6>(BFloat16{});
        if constexpr (kDown > 1) multiply_add_tiles<2, 5, 6>(BFloat16{});
        if constexpr (kRight > 1) {
          load_tile<6>(b.tile(1, h, s), 64);
          multiply_add_tiles<1, 4, 6>(BFloat16{});
          if constexpr (kDown > 1) multiply_add_tiles<3, 5, 6>(BFloat16{});
        }
      }
    } else {
      load_tile<4>(b.tile(0, 0, s), 64);
      if constexpr (kRight > 1) load_tile<5>(b.tile(1, 0, s), 64);
#pragma GCC unroll 2
      for (int h = 0; h < kParts; ++h) {
        load_tile<6>(a.tile(0, h, s), 64);
        multiply_add_tiles<0, 6, 4>(BFloat16{});
        if constexpr (kRight > 1) multiply_add_tiles<1, 6, 5>(BFloat16{});
        if constexpr (kDown > 1) {
          load_tile<6>(a.tile(1, h, s), 64);
          multiply_add_tiles<2, 6, 4>(BFloat16{});
          if constexpr (kRight > 1) multiply_add_tiles<3, 6, 5>(BFloat16{});
        }
      }
    }
  }
  store_tile<0>(c.tile(0, 0), c_bytes);
  if constexpr (kRight > 1) store_tile<1>(c.tile(0, 1), c_bytes);
  if constexpr (kDown > 1) store_tile<2>(c.tile(1, 0), c_bytes);
  if constexpr (kDown > 1 && kRight > 1) store_tile<3>(c.tile(1, 1), c_bytes);
}

/// C += A · B of two rows of tiles and `columns` of them, A in parts.
inline void multiply_wide(int64_t columns, const Steps& steps, TileOperand a, TileOperand b,
                          TileSums c) {
  for (int64_t j = 0; j < columns; j += 2) {
    if (j + 1 < columns) {
      multiply_tiles<2, 2, true, InParts::kLeft>(steps, a, b, c);
    } else {
      multiply_tiles<2, 1, true, InParts::kLeft>(steps, a, b, c);
    }
    b.data = b.tile(2, 0, 0);
    c.data = c.tile(0, 2);
  }
}
/// The same of `rows` rows and two columns, B in parts.
inline void multiply_high(int64_t rows, const Steps& steps, TileOperand a, TileOperand b,
                          TileSums c) {
  for (int64_t i = 0; i < rows; i += 2) {
    if (i + 1 < rows) {
      multiply_tiles<2, 2, true, InParts::kRight>(steps, a, b, c);
    } else {
      multiply_tiles<1, 2, true, InParts::kRight>(steps, a, b, c);
    }
    a.data = a.tile(2, 0, 0);
    c.data = c.tile(2, 0);
  }
}

/// 16 lines of 32 columns from `first` on of matrix rows; nullptr counts as zeros.
template <class Half>
QKV_INLINE void load_lines(const Half* const (&from)[kTileRows], int64_t first, int64_t width,
                           __m512 (&lines)[kTileRows]) {
  const int64_t left = width - first;
  const auto columns = left < kTileDepth ? (__mmask32(1) << left) - 1 : ~__mmask32(0);
#pragma GCC unroll 16
  for (int l = 0; l < kTileRows; ++l) {
    lines[l] = from[l] == nullptr
                   ? _mm512_setzero_ps()
                   : _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(columns, from[l] + first));
  }
}

/// Up to 16 rows of a matrix as they are: tiles A of [16 rows][32 columns], side by side.
inline void pack_lines(const BFloat16* const (&from)[kTileRows], int64_t width, BFloat16* to) {
  for (int64_t d = 0; d < width; d += kTileDepth, to += kTileRows * kTileDepth) {
    __m512 lines[kTileRows];
    load_lines(from, d, width, lines);
    for (int l = 0; l < kTileRows; ++l) _mm512_storeu_ps(to + l * kTileDepth, lines[l]);
  }
}

/// The same transposed: tiles B of [16 pairs of columns][16 rows], `next` tiles from each to the
/// next.
template <class Half>
inline void pack_pairs_of_columns(const Half* const (&from)[kTileRows], int64_t width, int64_t next,
                                  Half* to) {
  for (int64_t d = 0; d < width; d += kTileDepth, to += next * kTileRows * kTileDepth) {
    __m512 lines[kTileRows];
    load_lines(from, d, width, lines);
    transpose<float>(lines);  // pairs move as float32 numbers do
    for (int l = 0; l < kTileRows; ++l) _mm512_storeu_ps(to + l * kTileDepth, lines[l]);
  }
}

/// 16 columns of 16 pairs of rows, with zeros for what is not finite. False if something was not.
template <class Half>
QKV_INLINE bool load_pairs_of_rows(const Half* const (&first)[kTileRows],
                                   const Half* const (&second)[kTileRows], int64_t column,
                                   int64_t width, __m512 (&lines)[kTileRows]) {
  const auto exponent = _mm512_set1_epi16(Half::kExponent);
  __mmask32 non_finite = 0;
#pragma GCC unroll 16
  for (int l = 0; l < kTileRows; ++l) {
    const auto x = interleaved(first[l] == nullptr ? nullptr : first[l] + column,
                               second[l] == nullptr ? nullptr : second[l] + column, width - column);
    const auto lost = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    non_finite |= lost;
    lines[l] = _mm512_castsi512_ps(_mm512_maskz_mov_epi16(~lost, x));
  }
  return non_finite == 0;
}

/// Tiles B of [16 pairs of rows][16 columns], side by side.
inline bool pack_pairs_of_rows(const BFloat16* const (&first)[kTileRows],
                               const BFloat16* const (&second)[kTileRows], int64_t width,
                               BFloat16* to) {
  bool all_finite = true;
  for (int64_t d = 0; d < width; d += kTileRows, to += kTileRows * kTileDepth) {
    __m512 lines[kTileRows];
    all_finite &= load_pairs_of_rows(first, second, d, width, lines);
    for (int l = 0; l < kTileRows; ++l) _mm512_storeu_ps(to + l * kTileDepth, lines[l]);
  }
  return all_finite;
}

/// Two tiles A, of 32 whole columns of as many rows. False if something is not finite: then they
/// are not written, or only a part of them.
///
///     columns of a row         0 1 2 3 4 5 6 7 | 8 ..  | 16 .. | 24 ..         8 in a quarter
///     lower pairs of two       0 1 2 3         | 8 ..  | 16 .. | 24 ..         a lane each
///     upper                    4 5 6 7         | 12 .. | 20 .. | 28 ..
template <bool kHasAllRows, class Half>
QKV_INLINE bool pack_whole_columns(const Half* const (&first)[kTileRows],
                                   const Half* const (&second)[kTileRows], int64_t column,
                                   Half* to) {
  const auto exponent = _mm512_set1_epi16(Half::kExponent);
  const auto load = [=](const Half* row) __attribute__((always_inline)) {
    return kHasAllRows || row != nullptr ? _mm512_loadu_si512(row + column)
                                         : _mm512_setzero_si512();
  };
  auto largest = _mm512_setzero_si512();
  const auto pack = [&](auto upper) __attribute__((always_inline)) {
    __m512 lines[kTileRows];
#pragma GCC unroll 16
    for (int l = 0; l < kTileRows; ++l) {
      const auto a = load(first[l]), b = load(second[l]);
      if constexpr (upper() == 0) {
        largest = _mm512_max_epu16(largest, _mm512_and_si512(a, exponent));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(b, exponent));
        lines[l] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
      } else {
        lines[l] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
      }
    }
    transpose<float>(lines);
#pragma GCC unroll 16
    for (int l = 0; l < kTileRows; ++l) {
      const int of_lane = l / 4 * 8 + upper() * 4 + l % 4;
      _mm512_storeu_ps(to + of_lane * kTileDepth, lines[l]);
    }
  };
  pack(Constant<0>{});
  if (_mm512_cmpeq_epi16_mask(largest, exponent) != 0) return false;
  pack(Constant<1>{});
  return true;
}

/// As pack_pairs_of_rows, but transposed: tiles A of [16 columns][16 pairs of rows].
template <class Half>
inline bool pack_columns(const Half* const (&first)[kTileRows],
                         const Half* const (&second)[kTileRows], int64_t width, Half* to) {
  constexpr int64_t kTile = kTileRows * kTileDepth;
  bool all_finite = true;
  const bool has_all = second[kTileRows - 1] != nullptr;
  const auto pack_whole = [&](int64_t d) {
    return has_all ? pack_whole_columns<true>(first, second, d, to)
                   : pack_whole_columns<false>(first, second, d, to);
  };
  for (int64_t d = 0; d < width;) {
    if (d + kTileDepth <= width && pack_whole(d)) {
      d += kTileDepth;
      to += 2 * kTile;
      continue;
    }
    __m512 lines[kTileRows];
    all_finite &= load_pairs_of_rows(first, second, d, width, lines);
    transpose<float>(lines);
    for (int l = 0; l < kTileRows; ++l) _mm512_storeu_ps(to + l * kTileDepth, lines[l]);
    d += kTileRows;
    to += kTile;
  }
  return all_finite;
}

/// A float32 as the sum of two bfloat16, to within 2^-16 of it: its upper half, and the rest
/// rounded. Both are the upper halves of float32 numbers.
struct Halves {
  __m512i high;
  __m512i low;

  QKV_INLINE explicit Halves(__m512 x) {
    high = _mm512_castps_si512(x);
    const auto upper = _mm512_and_si512(high, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    const auto rest = _mm512_castps_si512(x - _mm512_castsi512_ps(upper));
    low = _mm512_add_epi32(rest, _mm512_set1_epi32(0x8000));
  }
};

/// Pairs of the upper halves.
QKV_INLINE __m512i pairs_of_upper(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second);
}

}  // namespace qkv::kernels::QKV_ISA
