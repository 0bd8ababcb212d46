#pragma once

#include "kernels/cpu/simd_avx512.h"
#include "kernels/half.h"

// AVX512-VNNI multiplies pairs of 16-bit integers and adds both products to one of 32 bits, at
// twice the rate of float32's multiply-adds:
//
//     sum[l] += a[2l] · b[2l] + a[2l + 1] · b[2l + 1]

namespace qkv::kernels::QKV_ISA {

struct Int16Pair {
  int16_t first;
  int16_t second;
};

/// What tile_product.inc.h asks for: numbers are pairs, sums integers of 32 bits.
template <>
struct Simd<Int16Pair> {
  /// Not __m512i, whose numbers have 64 bits: g++ would copy sums from one kind to the other.
  typedef int32_t Number __attribute__((vector_size(64)));
  using Factor = __m512i;
  static constexpr int kWidth = 16;
  static constexpr int kBroadcastRows = kRowsOfThree;
  static constexpr int kOuterVectors = 4;
  static constexpr int kOuterRows = kRowsOfFour;

  static QKV_INLINE Number zero() { return Number{}; }
  static QKV_INLINE Factor set(Int16Pair x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }
  static QKV_INLINE Factor load(const Int16Pair* p) { return _mm512_loadu_si512(p); }
  static QKV_INLINE void store(Int16Pair* p, Factor x) { _mm512_storeu_si512(p, x); }
  static QKV_INLINE Number fma(Factor a, Factor b, Number sum) {
    return reinterpret_cast<Number>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), a, b));
  }
};

/// x · scale, less than 2^15 in magnitude, rounded to nearest even: the lower 16 bits of each lane.
QKV_INLINE __m512i rounded_to_int16(__m512 x, __m512 scale) {
  return _mm512_castps_si512(_mm512_fmadd_ps(x, scale, _mm512_set1_ps(0x1.8p23f)));
}

/// Lane l: (first[l], second[l]) of the lower 16 bits of both.
QKV_INLINE __m512i low_halves(__m512i first, __m512i second) {
  constexpr int kEither = 0xec;  // first & mask | second
  return _mm512_ternarylogic_epi32(first, _mm512_slli_epi32(second, 16), _mm512_set1_epi32(0xffff),
                                   kEither);
}

QKV_INLINE __m512 magnitude(__m512 x) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

}  // namespace qkv::kernels::QKV_ISA
