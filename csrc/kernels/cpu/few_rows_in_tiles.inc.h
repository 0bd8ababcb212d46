#pragma once

#include "kernels/cpu/amx_blocks.inc.h"
#include "kernels/cpu/few_rows_of_numbers.inc.h"
#include "kernels/cpu/half_tile.inc.h"
#include "kernels/cpu/values_of_few_rows.inc.h"

// The products of few_rows.inc.h with scores by AMX, which rounds nothing. Whole tiles of keys are
// read where they lie:
//
//     S[16 keys][rows] = K · Qᵀ        A = K, B = Qᵀ in pairs of its columns, as narrow as S
//
// Values are multiplied by vectors, with weights in float32.

namespace qkv::kernels::QKV_ISA {

template <class Half>
struct FewRowsInTiles {
  using S = Simd<float>;
  using Query = HalfPair<Half>;
  using Numbers = FewRowsOfNumbers<float, Half>;
  static constexpr int kMostRows = Numbers::kMostRows, kLeastRows = Numbers::kLeastRows;

  /// Tiles of C and B have as many columns as there are rows of Q.
  template <int kRows>
  struct Registers : TileRegisters {
    Registers() : TileRegisters(kShapes) {}

   private:
    static constexpr TileShapes kShapes = TileShapes::of_narrow_products(kRows);
  };

  /// Tiles B, as wide in memory as a vector.
  static int64_t query_size(int64_t /*rows*/, int64_t width) {
    return column_pairs(width, kTileRows);
  }

  /// A row that is nullptr counts as zeros.
  template <int kRows>
  static void pack_query(const Half* const (&from)[kRows], int64_t width, float /*scale*/,
                         Query* query) {
    const Half* rows[kTileRows] = {};
    for (int r = 0; r < kRows; ++r) rows[r] = from[r];
    pack_pairs_of_columns(rows, width, 1, &query->first);
  }

  /// scores[k][r] = scale · <key_k, query_r>, those of 16 keys at a time.
  template <int kRows>
  static QKV_ONE_COPY void scores(int keys, int64_t width, const Half* key, int64_t key_row,
                                  const Query* query, float scale, float* scores,
                                  const NextRows& next) {
    int first = 0;
    const auto multiply = [&](auto tiles) __attribute__((always_inline)) {
      multiply_keys<kRows, tiles()>(first, keys, width, key, key_row, query, scores, next);
      first += tiles() * kTileRows;
    };
    while (first + 3 * kTileRows < keys) multiply(Constant<4>{});
    while (first < keys) multiply(Constant<1>{});
    const auto factor = S::set(scale);
    for (int x = 0; x < first * kRows; x += S::kWidth) {
      S::store(scores + x, rounded_product(S::load(scores + x), factor));
    }
  }

  template <int kRows>
  static void add_values(int keys, int64_t width, const Half* value, int64_t value_row,
                         const float* weights, float* out, int64_t out_row, const NextRows& next) {
    const auto add = [&](auto values) {
      values.template add_values<kRows>(keys, width, value, value_row, weights, out, out_row, next);
    };
    if constexpr (kIsBFloat16<Half>) {
      add(BFloat16Values{});
    } else {
      add(Numbers{});
    }
  }

 private:
  static constexpr int kA = 4, kB = 5;

  /// Of the keys of so many tiles, from `first` on, which are multiplied in turn, as a product
  /// waits for the one before it that it is added to.
  template <int kRows, int kTiles>
  static QKV_INLINE void multiply_keys(int first, int keys, int64_t width, const Half* key,
                                       int64_t key_row, const Query* query, float* scores,
                                       const NextRows& next) {
    set_tile_to_zero<0>();
    if constexpr (kTiles > 1) {
      set_tile_to_zero<1>();
      set_tile_to_zero<2>();
      set_tile_to_zero<3>();
    }
    for (int64_t d = 0; d < width; d += kTileDepth) {
      load_tile<kB>(query + d / 2 * kTileRows, kTileRows * int64_t{sizeof(Query)});
      const auto multiply = [&](auto tile) __attribute__((always_inline)) {
        const int k = first + tile() * kTileRows;
        load_keys(keys - k, key + k * key_row + d, key_row, width - d);
        multiply_add_tiles<tile(), kA, kB>(Half{});
        const int64_t begin = d * kTileRows / width, end = (d + kTileDepth) * kTileRows / width;
        next.fetch(k + begin, (end < kTileRows ? end : kTileRows) - begin);
      };
      multiply(Constant<0>{});
      if constexpr (kTiles > 1) {
        multiply(Constant<1>{});
        multiply(Constant<2>{});
        multiply(Constant<3>{});
      }
    }
    const auto store = [&](auto tile) __attribute__((always_inline)) {
      store_tile<tile()>(scores + (first + tile() * kTileRows) * kRows, kRows * sizeof(float));
    };
    store(Constant<0>{});
    if constexpr (kTiles > 1) {
      store(Constant<1>{});
      store(Constant<2>{});
      store(Constant<3>{});
    }
  }

  /// 16 keys and 32 columns where they lie; if there are fewer, a copy with zeros after them.
  static QKV_INLINE void load_keys(int keys, const Half* from, int64_t row, int64_t width) {
    if (keys >= kTileRows && width >= kTileDepth) {
      return load_tile<kA>(from, row * int64_t{sizeof(Half)});
    }
    alignas(64) Half copy[kTileRows][kTileDepth];
    const __mmask32 columns = first_lanes_of_32(width);
    for (int k = 0; k < kTileRows; ++k) {
      _mm512_storeu_si512(copy[k], k < keys ? _mm512_maskz_loadu_epi16(columns, from + k * row)
                                            : _mm512_setzero_si512());
    }
    load_tile<kA>(copy, sizeof(copy[0]));
  }
};

}  // namespace qkv::kernels::QKV_ISA
