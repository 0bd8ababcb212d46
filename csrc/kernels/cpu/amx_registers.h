#pragma once

#include <stdint.h>

#include "kernels/half.h"

// The tile registers of AMX, of 16 rows of 64 bytes.
//
// In assembly, because g++ 12 takes its own intrinsics of tiles for ones that read no memory, and
// moves stores of what they load behind them.

namespace qkv::kernels::QKV_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // terms of a product of two tiles

/// What ldtilecfg reads: all eight tiles are whole, or those of B and C in products of few columns
/// as narrow as they are.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  /// A is in tile 4.
  static constexpr TileShapes of_narrow_products(int columns) {
    TileShapes x;
    for (int tile = 0; tile < 8; ++tile) {
      if (tile != 4) x.row_bytes[tile] = static_cast<uint16_t>(4 * columns);
    }
    return x;
  }
};
constexpr TileShapes kWholeTiles;

/// A thread has tiles while this lives.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes = kWholeTiles) {
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileRegisters() { __asm__ volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

template <int kTile>
QKV_INLINE void load_tile(const void* x, int64_t row_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(x), "r"(row_bytes), "i"(kTile) : "memory");
}
template <int kTile>
QKV_INLINE void store_tile(void* x, int64_t row_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(x), "r"(row_bytes), "i"(kTile)
                   : "memory");
}
template <int kTile>
QKV_INLINE void set_tile_to_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
/// C += A · B of numbers like the argument.
template <int kC, int kA, int kB>
QKV_INLINE void multiply_add_tiles(BFloat16) {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
/// tdpfp16ps, which assemblers before binutils 2.40 have no name for.
template <int kC, int kA, int kB>
QKV_INLINE void multiply_add_tiles(Float16) {
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((~kB & 15) << 3 | 3),
                   "i"(0xc0 | kC << 3 | kA));
}

}  // namespace qkv::kernels::QKV_ISA
