#pragma once

#include "kernels/cpu/bfloat16_pairs_avx512.h"

// Pairs of float16 as AMX multiplies them. Vectors only round to them and widen them.

namespace qkv::kernels::QKV_ISA {

using Float16Pair = HalfPair<Float16>;

template <>
struct Simd<Float16Pair> {
  using Factor = __m512i;

  static QKV_INLINE Factor load(const Float16Pair* p) { return _mm512_loadu_si512(p); }
  static QKV_INLINE void store(Float16Pair* p, Factor x) { _mm512_storeu_si512(p, x); }

  /// (first[l], second[l]), rounded to nearest even.
  static QKV_INLINE Factor round(__m512 first, __m512 second) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const auto low = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(first, kNearest));
    const auto high = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(second, kNearest));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  /// sum + first + second
  static QKV_INLINE __m512 add(Factor pair, __m512 sum) {
    const auto first = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pair));
    const auto second = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pair, 16)));
    return sum + (first + second);
  }
};

}  // namespace qkv::kernels::QKV_ISA
