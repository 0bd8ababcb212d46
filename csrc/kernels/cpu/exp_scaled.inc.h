#pragma once

#include "kernels/cpu/math.inc.h"

// exp in nine operations instead of eleven, for processors that take the fraction of a number
// (VREDUCEPS) and multiply with a power of two (VSCALEFPS) in one operation each, as Emerald Rapids
// does. Others were not tried.

namespace qkv::kernels::QKV_ISA {

/// 2^r for 0 <= r < 1: minimax of the relative error with c0 = 1; 1.5e-7 with all roundings.
constexpr float kPowerOfFraction[] = {0.0018671300495043397f, 0.009017030708491802f,
                                      0.05579991266131401f,   0.24016444385051727f,
                                      0.6931512951850891f,    1.0f};
/// The same to within 3e-6.
constexpr float kRoughPowerOfFraction[] = {0.01342515442430408f, 0.05224537403890692f,
                                           0.2412785561011969f, 0.6930451545323913f, 1.0f};

/// x = 2^n · 2^r with n + r = x: 0 under 2^-90, NaN stays NaN.
template <int kTerms, int kCount>
QKV_INLINE void replace_by_powers(const float (&terms)[kTerms], __m512 (&x)[kCount]) {
  __m512 r[kCount], power[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    r[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    power[i] = _mm512_set1_ps(terms[0]);
  }
#pragma GCC unroll 5
  for (int k = 1; k < kTerms; ++k) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      power[i] = _mm512_fmadd_ps(power[i], r[i], _mm512_set1_ps(terms[k]));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const auto is_large = _mm512_cmp_ps_mask(x[i], _mm512_set1_ps(-90.0f), _CMP_NLT_UQ);
    x[i] = _mm512_maskz_scalef_ps(is_large, power[i], x[i]);
  }
}

/// exp(x) = 2^(x · log2 e). The relative error grows with |x| as that of the product does,
/// 2^-24 |x|; 0 and what is not finite as in exp_of_nonpositive of any other processor.
template <>
struct ExpOfNonpositive<float> {
  template <int kCount>
  static QKV_INLINE void replace(__m512 (&x)[kCount]) {
#pragma GCC unroll 8
    for (auto& y : x) y = y * _mm512_set1_ps(1.4426950408889634f);
    replace_by_powers(kPowerOfFraction, x);
  }
};

/// A Power of RoughWeigher.
struct PowerByScaling {
  static constexpr float kUnits = 1;
  static constexpr bool kSaturates = true;

  template <int kCount>
  static QKV_INLINE void replace(__m512 (&x)[kCount]) {
    replace_by_powers(kRoughPowerOfFraction, x);
  }
};

}  // namespace qkv::kernels::QKV_ISA
