#pragma once

#include "kernels/cpu/amx_squares.inc.h"
#include "kernels/cpu/tangent_products.inc.h"

// Products of a tangent tile by AMX, of matrices in bfloat16, laid out in squares of 32 keys and
// rows (amx_squares.inc.h). Tiles of the kernel (P', dS, ..) are cut into two bfloat16 numbers each
// and multiplied twice. Squares of which no pair is kept are left out.
//
// 0 · NaN is NaN: what is not finite in X and Y is left out where these are multiplied with tiles,
// and added afterwards for the pairs that are kept.

namespace qkv::kernels::QKV_ISA {

/// The matrices of the keys of one key/value head, packed.
struct AmxKeys {
  BFloat16* lines[kOfKeys]{};    // A [keys / 16][depths], for scores and dP
  BFloat16* columns[kOfKeys]{};  // A [keys / 32][columns], for sums of rows
  uint8_t* poisoned[kOfKeys]{};  // [keys / 32]: something in them is not finite

  AmxKeys(const TangentMatrices<float>& m, Pieces& pieces) {
    const int64_t squares = (m.p.keys + kSquare - 1) / kSquare;
    for (int i = 0; i < kOfKeys; ++i) {
      const auto x = OfKeys(i);
      const bool of_scores = x == kKey || x == kKeyT;
      if (!m.has(x)) continue;
      if (of_scores || m.of_backward) pieces.take(lines[x], 2 * squares * amx_depths(m.width(x)));
      if (of_scores && !m.of_backward) continue;
      pieces.take(columns[x], squares * amx_columns(m.width(x)));
      pieces.take(poisoned[x], (squares + kTileBytes - 1) / kTileBytes);
    }
  }

  static int64_t bytes(const TangentMatrices<float>& m) {
    Pieces pieces(nullptr);
    AmxKeys(m, pieces);
    return pieces.bytes();
  }

  /// Of the head of a tile of rows.
  template <int kRows>
  void pack(const TangentMatrices<float>& m, const RowTile<kRows>& tile) {
    for (int i = 0; i < kOfKeys; ++i) {
      const auto x = OfKeys(i);
      const int64_t stride = m.keys[x].row_stride, width = m.width(x);
      if (!m.has(x)) continue;
      const BFloat16* keys = tile.template stored_keys_of_head<BFloat16>(m.keys[x]);
      if (lines[x] != nullptr) pack_key_lines(keys, stride, m.p.keys, width, lines[x]);
      if (columns[x] != nullptr) {
        pack_key_columns(keys, stride, m.p.keys, width, columns[x], poisoned[x]);
      }
    }
  }
};

/// Products by AMX.
class AmxProducts {
 public:
  using Number = float;
  static constexpr int kRows = kBackwardVectors * Simd<float>::kWidth;
  static constexpr bool kScalesScores = false;
  static constexpr bool kRoundsTiles = false;
  static constexpr bool kOwnsMaskGradient = false;

  static int64_t first_key(int64_t begin) { return begin / kSquare * kSquare; }
  static int64_t sum_rows(int64_t width) { return amx_columns(width) * kTileRows; }

  static int64_t prepared_bytes(const TangentMatrices<float>& matrices) {
    return AmxKeys::bytes(matrices);
  }
  static void prepare(const TangentMatrices<float>& matrices, const RowTile<kRows>& tile,
                      void* prepared) {
    Pieces pieces(prepared);
    AmxKeys(matrices, pieces).pack(matrices, tile);
  }

  static int64_t scratch_numbers(const TangentMatrices<float>& matrices) {
    return Memory(matrices, nullptr, nullptr).bytes() / int64_t{sizeof(float)};
  }

  AmxProducts(const TangentMatrices<float>& matrices, void* prepared, float* scratch)
      : m_(matrices), memory_(matrices, prepared, scratch) {}

  QKV_ONE_COPY void load_rows(const RowTile<kRows>& tile) {
    tile_ = &tile;
    for (int i = 0; i < kOfRows; ++i) {
      const auto y = OfRows(i);
      if (!m_.has(y)) continue;
      rows_finite_[y] =
          pack_rows(tile, m_.rows[y], m_.width(y), memory_.row_columns[y], memory_.rows[y]);
    }
  }

  QKV_ONE_COPY void begin_block(const TangentBlock& block) {
    block_ = block;
    first_square_ = block.first_key / kSquare;
    for (int i = 0; i < squares_of(block.keys); ++i) {
      for (int g = 0; g < kSquares; ++g) is_empty_[i][g] = !keeps_some(i, g);
    }
  }

  /// c[keys][rows] (+)= X Yᵀ
  QKV_ONE_COPY void multiply(OfKeys x, OfRows y, float* c, bool add) const {
    for (int i = 0; i < squares_of(block_.keys); ++i) {
      for (int g = 0; g < kSquares; ++g) {
        if (is_empty_[i][g]) continue;
        const TileOperand a{memory_.keys.lines[x] + 2 * (first_square_ + i) * depths(x) * kTile,
                            depths(x), 0, 1};
        const TileOperand b{memory_.row_columns[y] + 2 * g * depths(y) * kTile, depths(y), 0, 1};
        const TileSums sums{c + i * kSquare * kRows + g * kSquare, kRows, kTileRows * kRows,
                            kTileRows};
        if (add) {
          multiply_tiles<2, 2, true, InParts::kNone>(Steps(depths(x)), a, b, sums);
        } else {
          multiply_tiles<2, 2, false, InParts::kNone>(Steps(depths(x)), a, b, sums);
        }
      }
    }
  }

  /// c[width][rows] += Xᵀ b for b[keys][rows]
  QKV_ONE_COPY void add_to_rows(OfKeys x, const float* b, float* c) const {
    if (!m_.has(x)) return;  // it has no columns
    for (int g = 0; g < kSquares; ++g) {
      Steps keys;
      for (int i = 0; i < squares_of(block_.keys); ++i) {
        if (is_empty_[i][g]) continue;
        keys.add(i);
        split_into_pairs(b, i, g, memory_.parts + 4 * i * kTile);
      }
      if (keys.count() == 0) continue;
      multiply_high(
          columns(x), keys,
          {memory_.keys.columns[x] + first_square_ * columns(x) * kTile, 1, 0, columns(x)},
          {memory_.parts, 1, 2, 4}, {c + g * kSquare, kRows, kTileRows * kRows, kTileRows});
    }
    for (int i = 0; i < squares_of(block_.keys); ++i) {
      if (memory_.keys.poisoned[x][first_square_ + i] != 0) add_non_finite(x, i, b, c);
    }
  }

  /// c[keys][width] += a Y for a[keys][rows]; rows of c are whole vectors, and it has whole squares
  QKV_ONE_COPY void add_to_keys(OfRows y, const float* a, float* c) const {
    const int64_t width = columns(y) * kTileRows;
    for (int i = 0; i < squares_of(block_.keys); ++i) {
      Steps rows;
      for (int g = 0; g < kSquares; ++g) {
        if (is_empty_[i][g]) continue;
        rows.add(g);
        split_into_lines(a, i, g, memory_.parts + 4 * g * kTile);
      }
      if (rows.count() == 0) continue;
      multiply_wide(columns(y), rows, {memory_.parts, 1, 2, 4}, {memory_.rows[y], 1, 0, columns(y)},
                    {c + i * kSquare * width, width, kTileRows * width, kTileRows});
    }
    if (!rows_finite_[y]) add_non_finite(y, a, c);
  }

 private:
  static constexpr int kSquares = kRows / kSquare;
  static constexpr int kBlockSquares = kBackwardBlockKeys / kSquare;
  static_assert(kRows % kSquare == 0 && kBackwardBlockKeys % kSquare == 0);

  /// Where there is what: or only how much it is, if scratch is nullptr.
  struct Memory {
    Pieces pieces;
    Pieces of_head;
    AmxKeys keys;
    BFloat16* parts;                   // of a row or column of squares of a tile
    BFloat16* row_columns[kOfRows]{};  // B [rows / 16][depths], for scores and dP
    BFloat16* rows[kOfRows]{};         // B [rows / 32][columns], for sums of keys

    Memory(const TangentMatrices<float>& m, void* prepared, void* scratch)
        : pieces(scratch), of_head(prepared), keys(m, of_head) {
      pieces.take(parts, 4 * (kSquares > kBlockSquares ? kSquares : kBlockSquares));
      for (int i = 0; i < kOfRows; ++i) {
        const auto y = OfRows(i);
        if (!m.has(y)) continue;
        pieces.take(row_columns[y], 2 * kSquares * amx_depths(m.width(y)));
        if (m.of_backward) pieces.take(rows[y], kSquares * amx_columns(m.width(y)));
      }
    }
    int64_t bytes() const { return pieces.bytes(); }
  };

  static constexpr int64_t kTile = kTileRows * kTileDepth;  // numbers in bfloat16

  static int64_t squares_of(int64_t keys) { return (keys + kSquare - 1) / kSquare; }

  template <class Matrix>
  int64_t depths(Matrix x) const {
    return amx_depths(m_.width(x));
  }
  template <class Matrix>
  int64_t columns(Matrix x) const {
    return amx_columns(m_.width(x));
  }

  /// Whether a square of the block has a pair that is kept.
  bool keeps_some(int i, int g) const {
    if (g * kSquare >= tile_->rows) return false;
    if (block_.state == TileState::kFull) return true;
    const int left = block_.keys - i * kSquare;
    return state_of_square(block_.bits + i * kSquare / 8 * kRows + g * kSquare, kRows,
                           left < kSquare ? left : kSquare) != TileState::kEmpty;
  }

  bool keeps(int k, int r) const {
    return block_.state == TileState::kFull || (block_.bits[k / 8 * kRows + r] >> (k % 8) & 1) != 0;
  }

  /// Of 32 keys, to rows.
  void add_non_finite(OfKeys x, int i, const float* b, float* c) const {
    const Operand<const float>& keys = m_.keys[x];
    const BFloat16* first_row =
        tile_->stored_keys_of_head<BFloat16>(keys) + block_.first_key * keys.row_stride;
    for (int k = i * kSquare; k < (i + 1) * kSquare && k < block_.keys; ++k) {
      const BFloat16* key = first_row + k * keys.row_stride;
      for (int64_t d = 0; d < m_.width(x); ++d) {
        if (is_finite(key[d])) continue;
        for (int r = 0; r < tile_->rows; ++r) {
          if (keeps(k, r)) c[d * kRows + r] += b[k * kRows + r] * static_cast<float>(key[d]);
        }
      }
    }
  }

  /// Of all rows, to keys.
  void add_non_finite(OfRows y, const float* a, float* c) const {
    const int64_t width = columns(y) * kTileRows;
    for (int r = 0; r < tile_->rows; ++r) {
      const BFloat16* row = tile_->stored_row<BFloat16>(m_.rows[y], r);
      for (int64_t d = 0; d < m_.width(y); ++d) {
        if (is_finite(row[d])) continue;
        for (int k = 0; k < block_.keys; ++k) {
          if (keeps(k, r)) c[k * width + d] += a[k * kRows + r] * static_cast<float>(row[d]);
        }
      }
    }
  }

  /// 32 keys and rows of a tile, of which there may be fewer.
  struct Square {
    const float* first;
    int keys;
    __mmask16 lanes[2];

    Square(const float* tile, int i, int g, int block_keys, int rows)
        : first(tile + i * kSquare * kRows + g * kSquare) {
      keys = block_keys - i * kSquare < kSquare ? block_keys - i * kSquare : kSquare;
      const int left = rows - g * kSquare;
      lanes[0] = first_lanes(left);
      lanes[1] = first_lanes(left > kTileRows ? left - kTileRows : 0);
    }

    QKV_INLINE Halves load(int k, int v) const {
      return Halves(k < keys ? _mm512_maskz_loadu_ps(lanes[v], first + k * kRows + v * kTileRows)
                             : _mm512_setzero_ps());
    }
  };

  Square square(const float* tile, int i, int g) const {
    return Square(tile, i, g, block_.keys, tile_->rows);
  }

  QKV_INLINE static void store_pairs(BFloat16* tile, int line, __m512i first, __m512i second) {
    _mm512_storeu_si512(tile + line * kTileDepth, pairs_of_upper(first, second));
  }

  /// Tiles A [2 parts][2 of keys] of 16 keys and 16 pairs of rows r and r + 16.
  void split_into_lines(const float* tile, int i, int g, BFloat16* to) const {
    const Square from = square(tile, i, g);
    for (int k = 0; k < kSquare; ++k) {
      const Halves first = from.load(k, 0), second = from.load(k, 1);
      BFloat16* of_keys = to + k / kTileRows * kTile;
      store_pairs(of_keys, k % kTileRows, first.high, second.high);
      store_pairs(of_keys + 2 * kTile, k % kTileRows, first.low, second.low);
    }
  }

  /// Tiles B [2 parts][2 of rows] of 16 pairs of keys and 16 rows.
  void split_into_pairs(const float* tile, int i, int g, BFloat16* to) const {
    const Square from = square(tile, i, g);
    for (int k = 0; k < kSquare; k += 2) {
      for (int v = 0; v < 2; ++v) {
        const Halves first = from.load(k, v), second = from.load(k + 1, v);
        store_pairs(to + v * kTile, k / 2, first.high, second.high);
        store_pairs(to + (v + 2) * kTile, k / 2, first.low, second.low);
      }
    }
  }

  TangentMatrices<float> m_;
  Memory memory_;
  TileRegisters registers_;
  const RowTile<kRows>* tile_ = nullptr;
  TangentBlock block_{};
  int64_t first_square_ = 0;                  // of the block, in keys_
  bool is_empty_[kBlockSquares][kSquares]{};  // squares of the block
  bool rows_finite_[kOfRows]{};
};

}  // namespace qkv::kernels::QKV_ISA
