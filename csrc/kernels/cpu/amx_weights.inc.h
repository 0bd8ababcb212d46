#pragma once

#include "kernels/cpu/amx_blocks.inc.h"

// Weights of two keys, rounded to pairs of 16 bits as AMX multiplies them, and what they add up to
// then: sum += first + second. NaN may become a number so, but the sum of its row before rounding
// is NaN, which divides it.

namespace qkv::kernels::QKV_ISA {

/// To nearest, ties away from zero. In integers: VCVTNE2PS2BF16 and VDPBF16PS take as long as four
/// additions each (Granite Rapids).
QKV_INLINE __m512i round_weights(BFloat16, __m512 first, __m512 second, __m512& sum) {
  const auto half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(-0x10000);
  const auto a = _mm512_add_epi32(_mm512_castps_si512(first), half);
  const auto b = _mm512_add_epi32(_mm512_castps_si512(second), half);
  sum = sum + _mm512_castsi512_ps(_mm512_and_si512(a, upper));
  sum = sum + _mm512_castsi512_ps(_mm512_and_si512(b, upper));
  return pairs_of_upper(a, b);
}

/// To nearest even.
QKV_INLINE __m512i round_weights(Float16, __m512 first, __m512 second, __m512& sum) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const auto low = _mm512_cvtps_ph(first, kNearest), high = _mm512_cvtps_ph(second, kNearest);
  sum = sum + (_mm512_cvtph_ps(low) + _mm512_cvtph_ps(high));
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

}  // namespace qkv::kernels::QKV_ISA
