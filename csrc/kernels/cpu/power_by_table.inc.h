#pragma once

#include "kernels/cpu/math.inc.h"

// 2^x for processors that permute, shift and add integers beside multiply-adds, as Zen 4 does: what
// the multiply-adds' pipes do of it is a polynomial of degree 2 and a product, instead of degree 4.

namespace qkv::kernels::QKV_ISA {

/// The fractions of 2^(i / 16).
alignas(64) inline constexpr int32_t kFractionsOfPowers[] = {
    0x000000, 0x05aac3, 0x0b95c2, 0x11c3d3, 0x1837f0, 0x1ef532, 0x25fed7, 0x2d583f,
    0x3504f3, 0x3d08a4, 0x45672a, 0x4e248c, 0x5744fd, 0x60ccdf, 0x6ac0c7, 0x75257d};

/// Of a float with 16 (n + 90) + i in its low bits: those of 2^(n - 37) · 2^(i / 16), in two parts,
/// but for n = -90, where there is no exponent.
struct BitsOfPower {
  __m512i exponent, fraction;

  QKV_INLINE explicit BitsOfPower(__m512 rounded) {
    const __m512i bits = _mm512_castps_si512(rounded);
    exponent = _mm512_and_si512(_mm512_slli_epi32(bits, 19), _mm512_set1_epi32(0x7f800000));
    // The index of a lane is its lowest 4 bits.
    fraction = _mm512_permutexvar_epi32(bits, _mm512_loadu_si512(kFractionsOfPowers));
  }
};

/// A Power of RoughWeigher: 2^(x / 16) = 2^n · 2^(i / 16) · 2^(r / 16) with 16 n + i + r = x and
/// |r| <= 1/2, to within 6e-7 from 2^-89 on. 0 under 2^-90, NaN stays NaN.
struct PowerByTable {
  using S = Simd<float>;
  static constexpr float kUnits = 16;
  static constexpr bool kSaturates = false;

  template <int kCount>
  static QKV_INLINE void replace(__m512 (&x)[kCount]) {
    // Leaves 16 (n + 90) + i in the low bits.
    const auto rounding = S::set(0x1.8p23f + 90 * kUnits);
    // The float with exponent bits n + 90 is 2^(n - 37). The cubic term, spread over r.
    constexpr float kScale = ExpConstants<float>::kScale, kLog = 0.043321698784996582f;
    constexpr float kLinear = kLog + kLog * kLog * kLog / 32, kSquare = kLog * kLog / 2;
    __m512 rounded[kCount], power[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      x[i] = S::maximum(S::set(-90 * kUnits), x[i]);
      rounded[i] = x[i] + rounding;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      x[i] = x[i] - (rounded[i] - rounding);
      power[i] = S::fma(S::set(kSquare * kScale), x[i], S::set(kLinear * kScale));
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) power[i] = S::fma(power[i], x[i], S::set(kScale));
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const BitsOfPower bits(rounded[i]);
      x[i] = power[i] * _mm512_castsi512_ps(_mm512_add_epi32(bits.exponent, bits.fraction));
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
