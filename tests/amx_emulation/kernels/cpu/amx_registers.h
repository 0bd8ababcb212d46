#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/half.h"

// The tile registers of AMX in software, in place of csrc/kernels/cpu/amx_registers.h, beside the
// instructions of tests/avx512_emulation. To use a tile without having tiles is an error, as it is
// in hardware.

namespace qkv::kernels::QKV_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;

struct EmulatedTile {
  alignas(64) char rows[kTileRows][64];
  int row_bytes;
};

struct EmulatedTiles {
  bool exist = false;
  EmulatedTile tile[8];
};

/// Those of this thread.
inline EmulatedTile& tile_register(int number) {
  thread_local EmulatedTiles tiles;
  if (number < 0) {  // configured, or released
    tiles.exist = number == -1;
    std::memset(tiles.tile, 0, sizeof(tiles.tile));
    for (auto& tile : tiles.tile) tile.row_bytes = 64;
    return tiles.tile[0];
  }
  if (!tiles.exist) {
    std::fputs("a tile was used without TileRegisters\n", stderr);
    std::abort();
  }
  return tiles.tile[number];
}

struct TileShapes {
  int narrow_row_bytes = 64;

  static constexpr TileShapes of_narrow_products(int columns) { return {4 * columns}; }
};
constexpr TileShapes kWholeTiles;

class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes = kWholeTiles) {
    tile_register(-1);
    for (int tile = 0; tile < 8; ++tile) {
      if (tile != 4) tile_register(tile).row_bytes = shapes.narrow_row_bytes;
    }
  }
  ~TileRegisters() { tile_register(-2); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

template <int kTile>
void load_tile(const void* x, int64_t row_bytes) {
  EmulatedTile& tile = tile_register(kTile);
  std::memset(tile.rows, 0, sizeof(tile.rows));
  for (int r = 0; r < kTileRows; ++r) {
    std::memcpy(tile.rows[r], static_cast<const char*>(x) + r * row_bytes, tile.row_bytes);
  }
}

template <int kTile>
void store_tile(void* x, int64_t row_bytes) {
  const EmulatedTile& tile = tile_register(kTile);
  for (int r = 0; r < kTileRows; ++r) {
    std::memcpy(static_cast<char*>(x) + r * row_bytes, tile.rows[r], tile.row_bytes);
  }
}

template <int kTile>
void set_tile_to_zero() {
  std::memset(tile_register(kTile).rows, 0, sizeof(EmulatedTile::rows));
}

/// C += A · B with every sum rounded to nearest; number(bits) is what 16 bits stand for.
template <class Number>
void multiply_add_emulated(int c_tile, int a_tile, int b_tile, Number number) {
  float c[16], b[16][32], a[32];
  const auto widen = [number](const char* row, float* to) {
    uint16_t halves[32];
    std::memcpy(halves, row, sizeof(halves));
    for (int i = 0; i < 32; ++i) to[i] = number(halves[i]);
  };
  for (int k = 0; k < 16; ++k) widen(tile_register(b_tile).rows[k], b[k]);
  for (int m = 0; m < kTileRows; ++m) {
    widen(tile_register(a_tile).rows[m], a);
    char* sums = tile_register(c_tile).rows[m];
    std::memcpy(c, sums, sizeof(c));
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        c[n] += a[2 * k] * b[k][2 * n];
        c[n] += a[2 * k + 1] * b[k][2 * n + 1];
      }
    }
    std::memcpy(sums, c, sizeof(c));
  }
}

/// TDPBF16PS: subnormal numbers count as zeros.
template <int kC, int kA, int kB>
void multiply_add_tiles(BFloat16) {
  multiply_add_emulated(kC, kA, kB, [](uint16_t bits) {
    return (bits & BFloat16::kExponent) == 0 ? 0.0f : float(BFloat16{bits});
  });
}

/// TDPFP16PS: subnormal numbers count.
template <int kC, int kA, int kB>
void multiply_add_tiles(Float16) {
  multiply_add_emulated(kC, kA, kB, [](uint16_t bits) { return float(Float16{bits}); });
}

}  // namespace qkv::kernels::QKV_ISA
