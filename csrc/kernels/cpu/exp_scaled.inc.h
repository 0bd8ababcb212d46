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

/// exp(x) = 2^n · 2^r with n + r = x · log2 e. The relative error grows with |x| as that of x does,
/// 2^-24 |x|; 0 and what is not finite as in exp_of_nonpositive of any other processor.
template <>
QKV_INLINE __m512 exp_of_nonpositive<float>(__m512 x) {
  const auto y = x * _mm512_set1_ps(1.4426950408889634f);
  const auto r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  auto power = _mm512_set1_ps(kPowerOfFraction[0]);
#pragma GCC unroll 5
  for (int k = 1; k < 6; ++k) {
    power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(kPowerOfFraction[k]));
  }
  const auto is_normal = _mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, power, y);
}

}  // namespace qkv::kernels::QKV_ISA
