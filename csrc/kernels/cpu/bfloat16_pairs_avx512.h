#pragma once

#include "kernels/cpu/simd_avx512.h"
#include "kernels/half.h"

// AVX512-BF16 multiplies pairs of bfloat16 and adds both products to a float32:
//
//     sum[l] += a[2l] · b[2l] + a[2l + 1] · b[2l + 1]
//
// Subnormal numbers count as zeros.

namespace qkv::kernels::QKV_ISA {

template <class Half>
struct HalfPair {
  Half first;
  Half second;
};
using BFloat16Pair = HalfPair<BFloat16>;

/// What tile_product.inc.h asks for: numbers are pairs, sums float32.
template <>
struct Simd<BFloat16Pair> {
  using Number = __m512;
  using Factor = __m512bh;
  static constexpr int kWidth = 16;
  static constexpr int kBroadcastRows = kRowsOfThree;
  static constexpr int kOuterVectors = 4;
  static constexpr int kOuterRows = kRowsOfFour;

  static QKV_INLINE Number zero() { return _mm512_setzero_ps(); }
  static QKV_INLINE Factor set(BFloat16Pair x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    return reinterpret_cast<Factor>(_mm512_set1_epi32(bits));
  }
  static QKV_INLINE Factor load(const BFloat16Pair* p) {
    return reinterpret_cast<Factor>(_mm512_loadu_si512(p));
  }
  static QKV_INLINE void store(BFloat16Pair* p, Factor x) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(x));
  }
  static QKV_INLINE Number fma(Factor a, Factor b, Number sum) {
    return _mm512_dpbf16_ps(sum, a, b);
  }
  /// sum + first + second
  static QKV_INLINE Number add(Factor pair, Number sum) {
    const BFloat16 one{0x3f80};
    return fma(pair, set({one, one}), sum);
  }
  /// first, then second, rounded to nearest even.
  static QKV_INLINE __m512i halves(Number first, Number second) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  }
  /// (first[l], second[l]), rounded so.
  static QKV_INLINE Factor round(Number first, Number second) {
    return reinterpret_cast<Factor>(
        _mm512_permutexvar_epi16(interleaved_halves(), halves(first, second)));
  }

 private:
  /// 0, 16, 1, 17, ..
  static QKV_INLINE __m512i interleaved_halves() {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(low,
                           _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
  }
};

/// As first_lanes, of 32 numbers in 16 bits.
QKV_INLINE __mmask32 first_lanes_of_32(int64_t count) {
  return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
}

/// Lane l: (first[l], second[l]), zeros from `count` on and where there is nullptr.
template <class Half>
QKV_INLINE __m512i interleaved(const Half* first, const Half* second, int64_t count) {
  const auto wide = [count](const Half* x) __attribute__((always_inline)) {
    const __mmask16 lanes = x != nullptr ? first_lanes(count) : __mmask16(0);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x));
  };
  return _mm512_or_si512(wide(first), _mm512_slli_epi32(wide(second), 16));
}

/// to[d] = (first[d], second[d]), whole vectors: zeros from `width` on and where there is nullptr.
inline void interleave(const BFloat16* first, const BFloat16* second, int64_t width,
                       BFloat16Pair* to) {
  const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // 0, 32, 1, 33, .. and 16, 48, 17, 49, ..
  const __m512i lower =
      _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(32)), 16));
  const __m512i upper = _mm512_add_epi16(lower, _mm512_set1_epi16(16));
  for (int64_t d = 0; d < width; d += 32) {
    const auto load = [&](const BFloat16* x) __attribute__((always_inline)) {
      return x == nullptr ? _mm512_setzero_si512()
                          : _mm512_maskz_loadu_epi16(first_lanes_of_32(width - d), x + d);
    };
    const __m512i a = load(first), b = load(second);
    _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, lower, b));
    if (d + 16 < width) _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, upper, b));
  }
}

}  // namespace qkv::kernels::QKV_ISA
