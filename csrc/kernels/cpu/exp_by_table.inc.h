#pragma once

#include "kernels/cpu/power_by_table.inc.h"

// exp with six multiply-adds instead of eight, for weights beside products (work_beside.inc.h). On
// its own it takes more operations than that of math.inc.h; passes of a backward have it as well,
// for the same bits.

namespace qkv::kernels::QKV_ISA {

/// As ExpOfNonpositive: exp(x) = 2^n · 2^(i / 16) · 2^(r / 16) with 16 n + i + r = 16 x · log2
/// e and |r| <= 1/2. Relative error 1.9e-7 with all roundings near 0, growing with |x| to 1e-6.
struct ExpByTable {
  using S = Simd<float>;

  template <int kCount>
  static QKV_INLINE void replace(__m512 (&x)[kCount]) {
    constexpr float kUnits = 16 * 1.4426950408889634f;
    // Leaves 16 (n + 90) + i in the low bits.
    const auto rounding = S::set(0x1.8p23f + 90 * 16);
    constexpr float kZero = -62.4f;  // 16 n + i = -1440: no exponent
    // The float with exponent bits n + 90 is 2^(n - 37).
    constexpr float kScale = 0x1p37f;
    // Minimax of the relative error with c0 = 1: 1.6e-9.
    constexpr float kLinear = 0.04332169891666526f, kSquare = 0.0009384151875669365f,
                    kCube = 1.3550326290374887e-05f;
    __m512 rounded[kCount], power[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      x[i] = S::maximum(S::set(kZero), x[i]);
      rounded[i] = S::fma(x[i], S::set(kUnits), rounding);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      x[i] = S::fma(x[i], S::set(kUnits), rounding - rounded[i]);
      power[i] = S::fma(S::set(kCube * kScale), x[i], S::set(kSquare * kScale));
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) power[i] = S::fma(power[i], x[i], S::set(kLinear * kScale));
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) power[i] = S::fma(power[i], x[i], S::set(kScale));
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const BitsOfPower bits(rounded[i]);
      // No exponent, no fraction: 0.
      const __m512i fraction = _mm512_min_epi32(bits.exponent, bits.fraction);
      x[i] =
          rounded_product(power[i], _mm512_castsi512_ps(_mm512_add_epi32(bits.exponent, fraction)));
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
