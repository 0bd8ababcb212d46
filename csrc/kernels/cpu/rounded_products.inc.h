#pragma once

#include "kernels/cpu/in_pairs.inc.h"
#include "kernels/cpu/tangent_products.inc.h"

// Products of a tangent tile all in bfloat16, two terms at a time, summed in float32: tiles (P, dS
// and what they become along a direction) are rounded where they are multiplied by a matrix, those
// of O' already where they are made (attention_jvp.inc.h).
//
//     Xᵀ · tile          X     pairs of keys [ columns -> ]
//                        tile  pairs of keys [ rows -> ]
//     tile · Y           tile  keys [ pairs of rows -> ]
//                        Y     pairs of rows [ columns -> ]
//
// With few keys there is little to win, and the rounding of few weights does not average out: tiles
// are multiplied in float32 then.
//
// What is not finite in X and Y is left out where some pairs are not kept, and added afterwards for
// those that are.

namespace qkv::kernels::QKV_ISA {

class RoundedProducts : public VectorProducts<InPairs> {
 public:
  using Base = VectorProducts<InPairs>;
  using Pairs = Simd<BFloat16Pair>;
  static constexpr bool kRoundsTiles = true;

  bool rounds_tiles() const { return rounds_tiles_of(m_.p); }

  /// The keys' matrices in pairs of keys, of a head whose tiles share them.
  static int64_t prepared_bytes(const TangentMatrices<float>& matrices) {
    const Problem<float>& p = matrices.p;
    if (!rounds_tiles_of(p) || rows_of_kv_head(p) <= kRows) return 0;
    int64_t pairs = 0;
    for_each_in_pairs(matrices, [&](OfKeys, int64_t size) { pairs += size; });
    return bytes_of_copies(p, pairs * static_cast<int64_t>(sizeof(BFloat16Pair)));
  }
  static void prepare(const TangentMatrices<float>& matrices, const RowTile<kRows>& tile,
                      void* prepared) {
    const KeyRange keys = keys_to_copy(matrices.p);
    if (prepared == nullptr || keys.empty()) return;
    auto* to = static_cast<BFloat16Pair*>(prepared);
    for_each_in_pairs(matrices, [&](OfKeys x, int64_t size) {
      const int64_t width = matrices.width(x), stride = matrices.keys[x].row_stride;
      pack_keys_in_pairs(tile.stored_keys_of_head<BFloat16>(matrices.keys[x]) + keys.begin * stride,
                         stride, keys.end - keys.begin, width,
                         to + keys.begin / 2 * round_up_to_vector<float>(width));
      to += size;
    });
  }

  static int64_t scratch_numbers(const TangentMatrices<float>& matrices) {
    return Base::scratch_numbers(matrices) + numbers_of_keys(matrices.p) + 2 * kNumbersOfTile;
  }

  RoundedProducts(const TangentMatrices<float>& matrices, void* prepared, float* scratch)
      : Base(matrices, nullptr, scratch) {
    auto* pairs = static_cast<const BFloat16Pair*>(prepared);
    for_each_in_pairs(matrices, [&](OfKeys x, int64_t size) {
      if (pairs == nullptr) return;
      prepared_[x] = pairs;
      pairs += size;
    });
    key_pairs_ = reinterpret_cast<BFloat16Pair*>(scratch + Base::scratch_numbers(matrices));
    tile_pairs_ = key_pairs_ + numbers_of_keys(matrices.p);
  }

  /// Room for two tiles in pairs of keys.
  BFloat16Pair* pairs(TileInPairs tile) const { return tile_pairs_ + tile * kNumbersOfTile; }

  /// c[width][rows] += Xᵀ b for b[keys][rows]
  QKV_ONE_COPY void add_to_rows(OfKeys x, const float* b, float* c) {
    if (!rounds_tiles()) return Base::add_to_rows(x, b, c);
    round_keys(b, pairs(kMoved));
    add_pairs_to_rows(x, kMoved, c);
  }

  /// The same of a tile that is there in pairs.
  QKV_ONE_COPY void add_pairs_to_rows(OfKeys x, TileInPairs tile, float* c) {
    const int64_t width = m_.width(x), row = round_up_to_vector<float>(width),
                  stride = m_.keys[x].row_stride;
    const BFloat16* keys_of_x =
        tile_->stored_keys_of_head<BFloat16>(m_.keys[x]) + block_.first_key * stride;
    const bool leaves_out = block_.state == TileState::kPartial &&
                            !all_finite<float>(keys_of_x, stride, block_.keys, width);
    // Those of the head end with a zero; else a key that comes after an odd number is none of ours.
    const bool ends_with_pair = block_.keys % 2 == 0 || block_.first_key + block_.keys == m_.p.keys;
    const BFloat16Pair* x_pairs = key_pairs_;
    if (prepared_[x] != nullptr && ends_with_pair && !leaves_out) {
      x_pairs = prepared_[x] + block_.first_key / 2 * row;
    } else {
      pack_keys_in_pairs(keys_of_x, stride, block_.keys, width, key_pairs_);
      if (leaves_out) set_non_finite_to_zero(pairs_of(block_.keys) * row, key_pairs_);
    }
    const BFloat16Pair* b = pairs(tile);
    seen_.for_each_part([&](int v, auto vectors, KeyRange keys) {
      const int r = v * S::kWidth;
      multiply_add<BFloat16Pair, vectors()>(
          width, pairs_of(keys.end - keys.begin), x_pairs + keys.begin / 2 * row, UnitStride{}, row,
          b + keys.begin / 2 * kRows + r, kRows, Sums<float>{c + r, kRows});
    });
    if (!leaves_out) return;
    const auto of_tile = [b](int k, int r) { return number_of_pairs<kRows>(b, k, r); };
    add_non_finite<kVectors, kRows>(block_.keys, width, keys_of_x, stride, of_tile, block_.bits, c);
  }

  /// c[keys][width] += a Y for a[keys][rows]; rows of c are whole vectors
  QKV_ONE_COPY void add_to_keys(OfRows y, const float* a, float* c) {
    if (!rounds_tiles()) return Base::add_to_keys(y, a, c);
    const int64_t row = round_up_to_vector<float>(m_.width(y));
    if (!has_rows_[y]) pack_rows(y);
    seen_.for_each_strip(block_.keys, [&](KeyRange keys, int r, int rows) {
      round_rows(a + r, keys, rows, tile_pairs_ + r / 2);
      multiply_add_rows<BFloat16Pair, kRows / 2>(
          keys.end - keys.begin, pairs_of(rows), tile_pairs_ + (keys.begin * kRows + r) / 2,
          packed_rows(y) + r / 2 * row, row, row, Sums<float>{c + keys.begin * row, row});
    });
    if (!rows_finite_[y]) add_non_finite_rows(y, a, c);
  }

 private:
  static constexpr int64_t kNumbersOfTile = kBackwardBlockKeys / 2 * kRows;

  static int64_t numbers_of_keys(const Problem<float>& p) {
    const int64_t widest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
    return kBackwardBlockKeys / 2 * round_up_to_vector<float>(widest);
  }
  static bool rounds_tiles_of(const Problem<float>& p) { return p.keys >= kForwardBlockKeys; }

  /// f(x, pairs that it takes) for what tiles are multiplied by.
  template <class F>
  static void for_each_in_pairs(const TangentMatrices<float>& m, F f) {
    for (int i = m.of_backward ? kKey : kValue; i < kOfKeys; ++i) {
      const auto x = OfKeys(i);
      if (m.has(x)) f(x, pairs_of(m.p.keys) * round_up_to_vector<float>(m.width(x)));
    }
  }

  static int64_t pairs_of(int64_t numbers) { return (numbers + 1) / 2; }

  BFloat16Pair* packed_rows(OfRows y) const { return reinterpret_cast<BFloat16Pair*>(packed_[y]); }
  const BFloat16* row_of_tile(OfRows y, int r) const {
    return r < tile_->rows ? tile_->stored_row<BFloat16>(m_.rows[y], r) : nullptr;
  }

  void pack_rows(OfRows y) {
    const int64_t width = m_.width(y), row = round_up_to_vector<float>(width);
    has_rows_[y] = rows_finite_[y] = true;
    for (int r = 0; r < kRows; r += 2) {
      interleave(row_of_tile(y, r), row_of_tile(y, r + 1), width, packed_rows(y) + r / 2 * row);
    }
    for (int r = 0; r < tile_->rows; ++r) {
      rows_finite_[y] &= all_finite<float>(row_of_tile(y, r), 0, 1, width);
    }
    if (!rows_finite_[y]) set_non_finite_to_zero(kRows / 2 * row, packed_rows(y));
  }

  /// What rows see of a tile.
  void round_keys(const float* tile, BFloat16Pair* to) const {
    seen_.for_each_part([&](int first, auto vectors, KeyRange keys) {
      for (int v = first; v < first + vectors(); ++v) {
        for (int64_t k = keys.begin; k < keys.end; k += 2) {
          const float* from = tile + k * kRows + v * S::kWidth;
          const auto second = k + 1 < keys.end ? S::load(from + kRows) : S::zero();
          Pairs::store(to + k / 2 * kRows + v * S::kWidth, Pairs::round(S::load(from), second));
        }
      }
    });
  }

  /// Keys of a tile and its first rows, a zero after an odd number of them.
  static void round_rows(const float* tile, KeyRange keys, int rows, BFloat16Pair* to) {
    auto* halves = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      const float* from = tile + k * kRows;
      int r = 0;
      for (; r + 2 * S::kWidth <= rows; r += 2 * S::kWidth) {
        const auto both = Pairs::halves(S::load(from + r), S::load(from + r + S::kWidth));
        _mm512_storeu_si512(halves + k * kRows + r, both);
      }
      for (; r < rows; r += S::kWidth) {
        const auto x = _mm512_maskz_loadu_ps(first_lanes(rows - r), from + r);
        S::store_bfloat16(halves + k * kRows + r, x);
      }
    }
  }

  /// What is not finite in Y, for the pairs that are kept.
  void add_non_finite_rows(OfRows y, const float* a, float* c) const {
    const int64_t width = m_.width(y), row = round_up_to_vector<float>(width);
    for (int r = 0; r < tile_->rows; ++r) {
      const BFloat16* numbers = row_of_tile(y, r);
      for (int64_t d = 0; d < width; ++d) {
        if (is_finite(numbers[d])) continue;
        for (int k = 0; k < block_.keys; ++k) {
          if (!keeps(k, r)) continue;
          c[k * row + d] += a[k * kRows + r] * static_cast<float>(numbers[d]);
        }
      }
    }
  }

  bool keeps(int k, int r) const {
    return block_.state == TileState::kFull || (block_.bits[k / 8 * kRows + r] >> (k % 8) & 1) != 0;
  }

  const BFloat16Pair* prepared_[kOfKeys]{};  // [keys / 2][width], of the head
  BFloat16Pair* key_pairs_;                  // [keys / 2][width], of a block
  BFloat16Pair* tile_pairs_;                 // two of [keys / 2][rows], or one of [keys][rows / 2]
};

}  // namespace qkv::kernels::QKV_ISA
