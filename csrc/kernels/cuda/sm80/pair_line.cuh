#pragma once

#include "kernels/cuda/simt/score.cuh"
#include "kernels/cuda/sm80/product.cuh"

// Options act on lines of pairs: the 16 of a lane that have their own row, or their own key, in
// common. Pair j of a line has the other number
//
//     j / 2 · 8 + 2 · (lane % 4) + j % 2          so line `half` of a tile is numbers 2 · half and
//                                                 2 · half + 1 of its 8 products
//
// and bits of a tile's pairs are those of both lines, 16 each. A kernel's code has one line, which
// its lanes go through one after the other.

namespace qkv::kernels::sm80 {

/// Which number of which product pair j of a line is.
constexpr QKV_INLINE int product_of_pair(int j) { return j / 2; }
constexpr QKV_INLINE int number_of_pair(int half, int j) { return 2 * half + j % 2; }

QKV_DEVICE int other_of_pair(int j) { return j / 2 * 8 + column_of_number(j % 2); }

/// A line whose own side is row or key `own` of the tile.
template <bool kOwnsKeys>
class PairLine {
 public:
  QKV_DEVICE PairLine(const Scores<float>& scores, const RowTile& tile, int own, int64_t first_key,
                      int keys)
      : scores_(scores), tile_(tile), own_(own), first_key_(first_key), keys_(keys) {}

  QKV_DEVICE int row(int j) const { return kOwnsKeys ? other_of_pair(j) : own_; }
  QKV_DEVICE int64_t key(int j) const { return first_key_ + (kOwnsKeys ? own_ : other_of_pair(j)); }

  /// x: scale · <q, k> -> scores; cap: see Scores::modify. Returns which are kept.
  QKV_DEVICE uint32_t modify(float (&x)[kPairsOfLine], float (&cap)[kPairsOfLine]) const {
    uint32_t kept = 0;
#pragma unroll
    for (int j = 0; j < kPairsOfLine; ++j) {
      const bool keep = key(j) < first_key_ + keys_ && scores_.in_band(tile_, row(j), key(j));
      kept |= static_cast<uint32_t>(keep) << j;
      cap[j] = 0.0f;
    }
    if (scores_.has_key_mask()) {
#pragma unroll
      for (int j = 0; j < kPairsOfLine; ++j) {
        if ((kept >> j & 1) != 0 && !scores_.keeps_key(key(j))) kept &= ~(1u << j);
      }
    }
    if (const float softcap = scores_.softcap(); softcap != 0.0f) {
#pragma unroll
      for (int j = 0; j < kPairsOfLine; ++j) {
        cap[j] = hyperbolic_tangent(x[j] / softcap);
        x[j] = softcap * cap[j];
      }
    }
    if (scores_.has_mask()) {
#pragma unroll
      for (int j = 0; j < kPairsOfLine; ++j) {
        if ((kept >> j & 1) != 0 && !scores_.add_mask(tile_, row(j), key(j), x[j])) {
          kept &= ~(1u << j);
        }
      }
    }
    if (scores_.has_slopes()) {
#pragma unroll
      for (int j = 0; j < kPairsOfLine; ++j) {
        if ((kept >> j & 1) != 0) x[j] -= scores_.slope(tile_, row(j)) * distance(j);
      }
    }
    return kept;
  }

  QKV_DEVICE float distance(int j) const { return scores_.distance(tile_, row(j), key(j)); }

  /// Bit j: dropout leaves the weight of pair j. Random words are of a row and 8 keys: lanes that
  /// need the same share the work. All lanes of a warp take part.
  QKV_DEVICE uint32_t stays() const {
    uint32_t bits = 0;
    if constexpr (!kOwnsKeys) {
      // Four lanes share the row; each needs one word, of two keys, of each 8 keys.
      const int own = lane() % 4;
#pragma unroll
      for (int set = 0; set < kTilesOfOthers; set += 4) {
        uint32_t words[4];
        scores_.random_words(tile_, own_, first_key_ / 8 + set + own, words);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t word = device::shuffle_xor(selected(words, own ^ k), k);
          const uint32_t two = static_cast<uint32_t>((word & 0xffff) >= scores_.threshold()) |
                               static_cast<uint32_t>((word >> 16) >= scores_.threshold()) << 1;
          bits |= two << 2 * (set + (own ^ k));
        }
      }
    } else {
      // Eight lanes share the rows, and their keys are 8 in a row; each needs half a word.
      const int own = lane() / 4;
#pragma unroll
      for (int set = 0; set < kPairsOfLine; set += 8) {
        uint32_t words[4];
        scores_.random_words(tile_, row(set + own), (first_key_ + own_) / 8, words);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t word = device::shuffle_xor(selected(words, (own ^ k) / 2), 4 * k);
          const bool stays = (word >> own % 2 * 16 & 0xffff) >= scores_.threshold();
          bits |= static_cast<uint32_t>(stays) << (set + (own ^ k));
        }
      }
    }
    return bits;
  }

 private:
  static QKV_DEVICE uint32_t selected(const uint32_t (&words)[4], int i) {
    const uint32_t low = i % 2 == 0 ? words[0] : words[1];
    const uint32_t high = i % 2 == 0 ? words[2] : words[3];
    return i < 2 ? low : high;
  }

  const Scores<float>& scores_;
  const RowTile& tile_;
  int own_;
  int64_t first_key_;
  int keys_;
};

}  // namespace qkv::kernels::sm80
