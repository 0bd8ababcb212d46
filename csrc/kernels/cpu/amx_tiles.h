#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"
#include "kernels/cpu/exp_scaled.inc.h"
#include "kernels/cpu/transpose.inc.h"

// AMX multiplies matrices that lie in tiles, registers of 16 rows of 64 bytes:
//
//     C[16][16] += A[16][32] · B[16][16]          A bfloat16, B pairs of it, C float32
//
//     C[i][j] += sum over k of A[i][2k] · B[k][j].first + A[i][2k + 1] · B[k][j].second
//
// with 16 times the multiply-adds of a vector unit in float32, and beside it: the tiles are worked
// on while vectors are. Subnormal numbers count as zeros.
//
// In assembly, because g++ 12 takes its own intrinsics of tiles for ones that read no memory, and
// moves stores of what they load behind them.

namespace qkv::kernels::QKV_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // terms of a product of two tiles

/// What ldtilecfg reads: all eight tiles are whole.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileShapes kWholeTiles;

/// A thread has tiles while this lives.
class TileRegisters {
 public:
  TileRegisters() { __asm__ volatile("ldtilecfg %0" ::"m"(kWholeTiles)); }
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
template <int kC, int kA, int kB>
QKV_INLINE void multiply_add_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

/// C[16][16 · columns] = A[16][32 · steps] · B[16 · steps][16 · columns], or += if it adds: up to
/// three tiles of C side by side, one product of two tiles at a time, so that vectors can work
/// meanwhile.
///
/// Five of the eight tiles are used, one row of products: 17 cycles a product, or 33 while, it
/// seems, another machine uses the same core. In all eight, two by two products, it is 17 or 70
/// (Emerald Rapids), as if few were left to rename them to.
template <int kColumns>
class TileProduct {
 public:
  struct Left {
    const BFloat16* data;
    int64_t row;
    int64_t step;
  };
  struct Right {
    const BFloat16Pair* data;
    int64_t row;
  };

  QKV_INLINE TileProduct(int64_t steps, Left a, Right b, float* c, int64_t c_row, bool adds)
      : steps_(steps), a_(a), b_(b), c_(c), c_bytes_(c_row * int64_t{sizeof(float)}), adds_(adds) {}

  QKV_INLINE int64_t products() const { return steps_ * kColumns; }
  QKV_INLINE bool is_done() const { return step_ == steps_; }

  QKV_INLINE void advance() {
    static_assert(kColumns <= 3);
    if (column_ == 0) {
      load_tile<kA>(a_.data + step_ * a_.step, a_.row * int64_t{sizeof(BFloat16)});
      advance_column<0>();
    } else if (column_ == 1) {
      if constexpr (kColumns > 1) advance_column<1>();
    } else {
      if constexpr (kColumns > 2) advance_column<2>();
    }
    if (++column_ < kColumns) return;
    column_ = 0;
    ++step_;
  }

  QKV_INLINE void finish() {
    while (!is_done()) advance();
  }

  /// To the product of the next rows of A and C.
  QKV_INLINE void move(int64_t a_offset, int64_t c_offset) {
    a_.data += a_offset;
    c_ += c_offset;
    step_ = 0;
  }

 private:
  static constexpr int kA = 3, kB = 4;

  template <int kColumn>
  QKV_INLINE void advance_column() {
    float* c = c_ + kColumn * kTileRows;
    if (step_ == 0) {
      if (adds_) {
        load_tile<kColumn>(c, c_bytes_);
      } else {
        set_tile_to_zero<kColumn>();
      }
    }
    load_tile<kB>(b_.data + step_ * (kTileDepth / 2) * b_.row + kColumn * kTileRows,
                  b_.row * int64_t{sizeof(BFloat16Pair)});
    multiply_add_tiles<kColumn, kA, kB>();
    if (step_ + 1 == steps_) store_tile<kColumn>(c, c_bytes_);
  }

  int64_t steps_;
  int64_t step_ = 0;
  int column_ = 0;
  Left a_;
  Right b_;
  float* c_;
  int64_t c_bytes_;
  bool adds_;
};

}  // namespace qkv::kernels::QKV_ISA
