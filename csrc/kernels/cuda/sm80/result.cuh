#pragma once

#include "kernels/cuda/sm80/product.cuh"

// Sums of products on their way from registers to memory.

namespace qkv::kernels::sm80 {

/// A row of a result of 16-bit numbers, as many as `columns`.
template <class Element>
struct ResultRow {
  Element* first;
  int64_t stride;  // from one column to the next

  QKV_DEVICE bool takes_words(int64_t columns) const {
    return stride == 1 && columns % 2 == 0 && reinterpret_cast<uintptr_t>(first) % 4 == 0;
  }
};

/// Writes factor · sums of a row, of which a lane has two numbers in each 8: kWidth columns from
/// first_column on, of the `columns` that there are. What rounding took goes to another row, if
/// there is one.
template <int kWidth, class Element, class Sum>
QKV_DEVICE void write_row(Sum (&sums)[kWidth / 8][4], int half, float factor, int64_t first_column,
                          int64_t columns, const ResultRow<Element>& row,
                          const ResultRow<Element>& rests = {}) {
  const Element* type = nullptr;
  const int64_t first = first_column + column_of_number(0);
  const bool has_rests = rests.first != nullptr;
  if (row.takes_words(columns) && (!has_rests || rests.takes_words(columns))) {
    const int left = at_most(kWidth, columns - first);
#pragma unroll
    for (int c = 0; c < kWidth / 8; ++c) {
      if (c * 8 >= left) break;
      const float x = factor * sums[c][2 * half], y = factor * sums[c][2 * half + 1];
      const uint32_t word = device::rounded_pair(x, y, type);
      device::store_global(reinterpret_cast<uint32_t*>(row.first + first) + c * 4, word);
      if (has_rests) {
        const uint32_t rest = device::rounded_pair(x - number_of_word<Element>(word, 0),
                                                   y - number_of_word<Element>(word, 1), type);
        device::store_global(reinterpret_cast<uint32_t*>(rests.first + first) + c * 4, rest);
      }
    }
    return;
  }
  // Number by number, and nothing unrolled: not in registers.
  float numbers[kWidth / 4];
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) numbers[i] = factor * sums[i / 2][2 * half + i % 2];
#pragma unroll 1
  for (int i = 0; i < kWidth / 4; ++i) {
    const int64_t column = first + i / 2 * 8 + i % 2;
    if (column >= columns) break;
    const uint32_t word = device::rounded_pair(numbers[i], 0.0f, type);
    device::store_global(row.first + column * row.stride,
                         Element{static_cast<uint16_t>(word & 0xffff)});
    if (has_rests) {
      const uint32_t rest =
          device::rounded_pair(numbers[i] - number_of_word<Element>(word, 0), 0.0f, type);
      device::store_global(rests.first + column * rests.stride,
                           Element{static_cast<uint16_t>(rest & 0xffff)});
    }
  }
}

}  // namespace qkv::kernels::sm80
