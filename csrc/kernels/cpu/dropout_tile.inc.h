#pragma once

#include "kernels/cpu/row_tile.inc.h"
#include "kernels/philox.h"

// Which weights of a tile stay, one bit a pair, as in mask_tile.inc.h:
//
//     stays[g][r], bit b  =  row r keeps its weight of key first_key + 8·g + b

namespace qkv::kernels::QKV_ISA {

/// first_key is a multiple of 8.
template <int kRows>
inline void load_dropout(const Dropout& dropout, const RowTile<kRows>& tile, int64_t first_key,
                         int keys, uint8_t* stays) {
  constexpr int kLanes = Words::kLanes;
  const auto key = static_cast<uint64_t>(dropout.seed[tile.batch.offset(dropout.batch_stride)]);
  for (int first_row = 0; first_row < tile.rows; first_row += kLanes) {
    uint32_t query[kLanes], head[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int row = first_row + l < tile.rows ? first_row + l : first_row;
      query[l] = static_cast<uint32_t>(tile.query[row]);
      head[l] = static_cast<uint32_t>(dropout.first_head + tile.head[row]);
    }
    const int lanes = kRows - first_row < kLanes ? kRows - first_row : kLanes;
    for (int k = 0; k < keys; k += 8) {
      Words::Vector words[4] = {Words::set(static_cast<uint32_t>((first_key + k) / 8)),
                                Words::load(query), Words::load(head), Words::set(0)};
      philox<Words>(words, key);
      uint32_t bits[kLanes] = {};
      for (int w = 0; w < 4; ++w) {
        uint32_t word[kLanes];
        Words::store(word, words[w]);
        for (int l = 0; l < kLanes; ++l) {
          bits[l] |= static_cast<uint32_t>((word[l] & 0xffff) >= dropout.threshold) << (2 * w);
          bits[l] |= static_cast<uint32_t>((word[l] >> 16) >= dropout.threshold) << (2 * w + 1);
        }
      }
      uint8_t* to = stays + k / 8 * kRows + first_row;
      for (int l = 0; l < lanes; ++l) to[l] = static_cast<uint8_t>(bits[l]);
    }
  }
}

/// weights[k][r] = 0 where it is dropped, for kVectors vectors of the tile's kRows rows. What stays
/// is not scaled up.
template <class T, int kVectors, int kRows = kVectors* Simd<T>::kWidth>
inline void drop(const uint8_t* stays, int keys, T* weights) {
  using S = Simd<T>;
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      T* w = weights + k * kRows + v * S::kWidth;
      const auto stays_k = S::bit_of_bytes(stays + k / 8 * kRows + v * S::kWidth, k % 8);
      S::store(w, S::select(stays_k, S::load(w), S::zero()));
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
