#pragma once

#include "kernels/cpu/row_tile.inc.h"
#include "kernels/philox.h"

// Which weights of a tile stay, one bit a pair, as in mask_tile.inc.h:
//
//     stays[g][r], bit b  =  row r keeps its weight of key first_key + 8·g + b

namespace qkv::kernels::QKV_ISA {

/// first_key is a multiple of 8.
template <int kRows>
QKV_ONE_COPY void load_dropout(const Dropout& dropout, const RowTile<kRows>& tile,
                               int64_t first_key, int keys, uint8_t* stays) {
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
      uint8_t bytes[kLanes];
      Words::halves_at_least(words, dropout.threshold, bytes);
      uint8_t* to = stays + k / 8 * kRows + first_row;
      for (int l = 0; l < lanes; ++l) to[l] = bytes[l];
    }
  }
}

/// Weights of key k and vector v of the tile's kRows rows, 0 where they are dropped. What stays is
/// not scaled up.
template <class T, int kRows>
QKV_INLINE typename Simd<T>::Number undropped(const uint8_t* stays, int64_t k, int v,
                                              typename Simd<T>::Number weight) {
  using S = Simd<T>;
  const auto stays_k = S::bit_of_bytes(stays + k / 8 * kRows + v * S::kWidth, k % 8);
  return S::select(stays_k, weight, S::zero());
}

}  // namespace qkv::kernels::QKV_ISA
