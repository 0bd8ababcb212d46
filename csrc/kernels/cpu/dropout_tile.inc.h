#pragma once

#include "kernels/cpu/row_tile.inc.h"
#include "kernels/philox.h"

// Which weights of a tile stay, one bit a pair, as in mask_tile.inc.h:
//
//     stays[g][r], bit b  =  row r keeps its weight of key first_key + 8·g + b

namespace qkv::kernels::QKV_ISA {

/// What a weight that stays is multiplied with: 1 / (1 - p).
template <class T>
inline T dropout_scale(const Dropout& dropout) {
  return dropout.threshold == 65536 ? T(0) : T(65536) / static_cast<T>(65536 - dropout.threshold);
}

/// first_key is a multiple of 8.
template <int kRows>
inline void load_dropout(const Dropout& dropout, const RowTile<kRows>& tile, int64_t first_key,
                         int keys, uint8_t* stays) {
  constexpr int kLanes = kRows % 16 == 0 ? 16 : kRows % 8 == 0 ? 8 : kRows % 4 == 0 ? 4 : 2;
  const auto key = static_cast<uint64_t>(dropout.seed[tile.batch.offset(dropout.batch_stride)]);
  for (int first_row = 0; first_row < tile.rows; first_row += kLanes) {
    uint32_t query[kLanes], head[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int row = first_row + l < tile.rows ? first_row + l : first_row;
      query[l] = static_cast<uint32_t>(tile.query[row]);
      head[l] = static_cast<uint32_t>(tile.head[row]);
    }
    for (int k = 0; k < keys; k += 8) {
      uint32_t words[4][kLanes];
      for (int l = 0; l < kLanes; ++l) {
        words[0][l] = static_cast<uint32_t>((first_key + k) / 8);
        words[1][l] = query[l];
        words[2][l] = head[l];
        words[3][l] = 0;
      }
      philox<kLanes>(words[0], words[1], words[2], words[3], key);
      uint32_t bits[kLanes] = {};
      for (int w = 0; w < 4; ++w) {
        for (int l = 0; l < kLanes; ++l) {
          const uint32_t low = words[w][l] & 0xffff, high = words[w][l] >> 16;
          bits[l] |= static_cast<uint32_t>(low >= dropout.threshold) << (2 * w);
          bits[l] |= static_cast<uint32_t>(high >= dropout.threshold) << (2 * w + 1);
        }
      }
      for (int l = 0; l < kLanes; ++l) {
        stays[k / 8 * kRows + first_row + l] = static_cast<uint8_t>(bits[l]);
      }
    }
  }
}

/// weights[k][r] = 0 where it is dropped. What stays is not scaled up.
template <class T, int kVectors>
inline void drop(const uint8_t* stays, int keys, T* weights) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * S::kWidth;
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      T* w = weights + k * kRows + v * S::kWidth;
      const auto stays_k = S::bit_of_bytes(stays + k / 8 * kRows + v * S::kWidth, k % 8);
      S::store(w, S::select(stays_k, S::load(w), S::zero()));
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
