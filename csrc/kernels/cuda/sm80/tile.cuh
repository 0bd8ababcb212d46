#pragma once

#include "kernels/cuda/simt/tile.cuh"
#include "kernels/cuda/tensor_cores.cuh"

// What the kernels for tensor cores have in common. A block's four warps have 16 or 32 rows of a
// tile each, one or two tiles of a product, and walk over the keys 64 at a time:
//
//                   keys ->  0 1 2 .. 7 | 8 ..        | .. 63      a lane has of each 16 x 8 pairs
//     rows 0 .. 15           lane 0 0 1 1 2 2 3 3                  keys 2 · (lane % 4) and the next
//     of a warp                   4 4 5 5 6 6 7 7                  of row lane / 4 and of row
//                                 :                                lane / 4 + 8
//
// so that maxima and sums of rows are shuffles among four lanes. What does not depend on how pairs
// lie among threads is the kernels' for any GPU.

namespace qkv::kernels::sm80 {

using namespace simt;

constexpr int kThreadsOfBlock = 128;
constexpr int kKeys = kOthers;
constexpr int kTilesOfOthers = kOthers / 8;
constexpr int kRowsOfProduct = 16;
constexpr int kStepOfProduct = 16;

/// Numbers after each row of a tile in shared memory, with which the rows that ldmatrix reads at
/// once lie in different banks.
constexpr int kPadOfRow = 8;

/// Numbers from one row to the next: all that products take, and those.
constexpr QKV_INLINE int row_step(int64_t columns) {
  return static_cast<int>((columns + kStepOfProduct - 1) / kStepOfProduct * kStepOfProduct) +
         kPadOfRow;
}

QKV_DEVICE int lane() { return device::thread() % device::kWarp; }
QKV_DEVICE int warp() { return device::thread() / device::kWarp; }

/// Brings kRows rows of one side of a product to shared memory, columns first_column .. + width of
/// the `columns` that there are, and zeros where there is none. In pieces they are on their way
/// then, else they come number by number. kUnrolled: how many columns at a time.
template <int kRows, int kUnrolled, class Side>
QKV_DEVICE void copy_rows(const Side& side, int64_t first_column, int64_t columns, int width,
                          typename Side::Stored* to, int step) {
  constexpr int kPiece = 8, kLanes = 8, kRowsAtOnce = kThreadsOfBlock / kLanes;
  const int first_row = device::thread() / kLanes, first = device::thread() % kLanes * kPiece;
  if (side.template lies_in_pieces<kPiece>(columns)) {
    const int left = at_most(width, columns - first_column);
#pragma unroll 1
    for (int block = 0; block < width; block += kUnrolled) {
#pragma unroll
      for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
        const int row = first_row + i * kRowsAtOnce;
        const auto begin = side.place(row, first_column);
        const auto* from = begin.exists ? begin.at : side.first();
#pragma unroll
        for (int j = 0; j < kUnrolled / (kLanes * kPiece); ++j) {
          const int c = block + first + j * kLanes * kPiece;
          const bool exists = begin.exists && c < left;
          if (c < width) device::copy_async(to + row * step + c, exists ? from + c : from, exists);
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < kRows; row += kRowsAtOnce) {
#pragma unroll 1
    for (int c = first; c < width; c += kLanes * kPiece) {
      const auto piece = fetch_piece<false, kPiece>(side, row, first_column + c, columns);
      device::store_shared(reinterpret_cast<uint32_t*>(to + row * step + c), piece.words);
    }
  }
}

/// Number i, 0 or 1, of a word.
template <class Element>
QKV_DEVICE float number_of_word(uint32_t word, int i) {
  return Element{static_cast<uint16_t>(word >> i * 16)};
}

/// Whether it is neither infinite nor NaN.
template <class Element>
QKV_DEVICE bool half_is_finite(uint32_t word, int i) {
  return (word >> i * 16 & Element::kExponent) != Element::kExponent;
}

/// The left side of a product from rows of a tile in shared memory.
template <class Element>
QKV_DEVICE void load_left(const Element* rows, int step, uint32_t (&a)[4]) {
  device::load_matrices<false>(rows + lane() % 16 * step + lane() / 16 * 8, a);
}

/// The right sides of two products, b[0], b[1] and b[2], b[3], from 16 rows of a tile, which are
/// their columns.
template <class Element>
QKV_DEVICE void load_right_of_rows(const Element* rows, int step, uint32_t (&b)[4]) {
  const int row = lane() / 16 * 8 + lane() % 8;
  device::load_matrices<false>(rows + row * step + lane() / 8 % 2 * 8, b);
}

/// The same from 16 rows of a tile that are their rows, and 16 columns.
template <class Element>
QKV_DEVICE void load_right_of_columns(const Element* rows, int step, uint32_t (&b)[4]) {
  device::load_matrices<true>(rows + lane() % 16 * step + lane() / 16 * 8, b);
}

/// The 16 x 8 numbers of a product that a lane has: which row and column number i is.
QKV_DEVICE int row_of_number(int i) { return lane() / 4 + i / 2 * 8; }
QKV_DEVICE int column_of_number(int i) { return lane() % 4 * 2 + i % 2; }

/// Pairs of a lane with the same own row or key, and the bit of number i of product n among those
/// of both lines.
constexpr int kPairsOfLine = 2 * kTilesOfOthers;
constexpr QKV_INLINE int bit_of_number(int n, int i) {
  return i / 2 * kPairsOfLine + 2 * n + i % 2;
}

}  // namespace qkv::kernels::sm80
