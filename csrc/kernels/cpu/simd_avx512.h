#pragma once

#include <immintrin.h>
#include <stdint.h>

// Vectors of 16 floats or 8 doubles. The interface is the same in simd_avx2.h and simd_generic.h,
// but for load_first and store_first, which not all have; arithmetic is written with operators,
// which g++ and clang define for vector types.

#define QKV_INLINE inline __attribute__((always_inline))

namespace qkv::kernels::QKV_ISA {

// Rows of a product that are summed together, of 3 vectors each, or of 4 if they are long.
#ifdef QKV_FEWER_SUMS  // by isa_avx512_bf16.cpp, which says why
constexpr int kRowsOfThree = 4, kRowsOfFour = 4;
#else
constexpr int kRowsOfThree = 8, kRowsOfFour = 6;  // 8 x 3 sums, 3 operands: 27 of 32 registers
#endif

/// The lanes 0 .. count of a vector.
QKV_INLINE __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
}

template <class T>
struct Simd;

template <>
struct Simd<float> {
  using Number = __m512;
  using Mask = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr int kMostSums = 24;  // in registers
  static constexpr int kBroadcastRows = kRowsOfThree;
  static constexpr int kOuterVectors = 4;  // the shape for long rows of C
  static constexpr int kOuterRows = kRowsOfFour;

  static QKV_INLINE Number zero() { return _mm512_setzero_ps(); }
  static QKV_INLINE Number set(float x) { return _mm512_set1_ps(x); }
  static QKV_INLINE Number load(const float* p) { return _mm512_loadu_ps(p); }
  /// The first `count` numbers; what lies after them is not touched, and counts as zeros.
  static constexpr bool kLoadsFirst = true, kStoresFirst = true;
  static QKV_INLINE Number load_first(const float* p, int64_t count) {
    return _mm512_maskz_loadu_ps(first_lanes(count), p);
  }
  static QKV_INLINE void store_first(float* p, Number x, int64_t count) {
    _mm512_mask_storeu_ps(p, first_lanes(count), x);
  }
  static QKV_INLINE void store_first_halves(uint16_t* p, const uint16_t* halves, int64_t count) {
    _mm256_mask_storeu_epi16(p, first_lanes(count),
                             _mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
  }
  static QKV_INLINE void store(float* p, Number x) { _mm512_storeu_ps(p, x); }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return _mm512_fmadd_ps(a, b, c); }
  static QKV_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static QKV_INLINE Number load_bfloat16(const uint16_t* p) {
    return widen_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static QKV_INLINE Number load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static QKV_INLINE Number load_first_bfloat16(const uint16_t* p, int64_t count) {
    return widen_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(count), p));
  }
  static QKV_INLINE Number load_first_float16(const uint16_t* p, int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
  }
  static QKV_INLINE void store_bfloat16(uint16_t* p, Number x) {
    const auto to = reinterpret_cast<__m256i*>(p);
#ifdef __AVX512BF16__
    constexpr int kSubnormal = 0x20;  // which that instruction makes 0
    if (__builtin_expect(_mm512_fpclass_ps_mask(x, kSubnormal) == 0, 1)) {
      return _mm256_storeu_si256(to, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    }
#endif
    _mm256_storeu_si256(to, rounded_to_bfloat16(x));
  }
  static QKV_INLINE void store_float16(uint16_t* p, Number x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static QKV_INLINE float sum(Number x) { return _mm512_reduce_add_ps(x); }
  /// to[l] = the sum of numbers l of all quarters, for four l
  static QKV_INLINE void store_sum_of_quarters(float* to, Number x) {
    const __m256 half = _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1);
    _mm_storeu_ps(to, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
  }
  /// A NaN in `b` stays, a NaN in `a` may be lost.
  static QKV_INLINE Number maximum(Number a, Number b) { return _mm512_max_ps(a, b); }
  static QKV_INLINE Number minimum(Number a, Number b) { return _mm512_min_ps(a, b); }
  /// a / b, but for the last bit, for a normal b; a step of Newton's takes 14 bits of 1 / b to 24.
  /// A division would take as long as 10 (Zen 4) or 16 (Intel) multiply-adds.
  static QKV_INLINE Number ratio(Number a, Number b) {
    const Number guess = _mm512_rcp14_ps(b), rest = _mm512_fnmadd_ps(guess, b, set(1.0f));
    return a * _mm512_fmadd_ps(guess, rest, guess);
  }
  /// From 1.5 · 2^23 + n, n >= 0: the number with exponent bits n, which is 0 for n = 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static QKV_INLINE Mask less(Number a, Number b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) {
    return _mm512_mask_blend_ps(m, b, a);
  }
  /// Lane l to bit l.
  static QKV_INLINE unsigned bits_of(Mask m) { return m; }
  /// Lane r: is bit `bit` of bytes[r] set?
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return _mm_test_epi8_mask(b, _mm_set1_epi8(static_cast<char>(1 << bit)));
  }

 private:
  static QKV_INLINE Number widen_bfloat16(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static QKV_INLINE __m256i rounded_to_bfloat16(Number x) {
    const __m512i wide = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const Mask number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);  // NaN stays without its tail
    const __m512i nan = _mm512_or_si512(wide, _mm512_set1_epi32(0x400000));
    const __m512i rounded = _mm512_mask_add_epi32(nan, number, wide, half);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
};

template <>
struct Simd<double> {
  using Number = __m512d;
  using Mask = __mmask8;
  static constexpr int kWidth = 8;
  static constexpr int kMostSums = 24;  // in registers
  static constexpr int kBroadcastRows = kRowsOfThree;
  static constexpr int kOuterVectors = 4;
  static constexpr int kOuterRows = kRowsOfFour;

  static QKV_INLINE Number zero() { return _mm512_setzero_pd(); }
  static QKV_INLINE Number set(double x) { return _mm512_set1_pd(x); }
  static QKV_INLINE Number load(const double* p) { return _mm512_loadu_pd(p); }
  static constexpr bool kLoadsFirst = true, kStoresFirst = true;
  static QKV_INLINE Number load_first(const double* p, int64_t count) {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>(first_lanes(count)), p);
  }
  static QKV_INLINE void store_first(double* p, Number x, int64_t count) {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first_lanes(count)), x);
  }
  static QKV_INLINE void store(double* p, Number x) { _mm512_storeu_pd(p, x); }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return _mm512_fmadd_pd(a, b, c); }
  static QKV_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
  static QKV_INLINE double sum(Number x) { return _mm512_reduce_add_pd(x); }
  static QKV_INLINE Number maximum(Number a, Number b) { return _mm512_max_pd(a, b); }
  static QKV_INLINE Number minimum(Number a, Number b) { return _mm512_min_pd(a, b); }
  /// From 1.5 · 2^52 + n, n >= 0: the number with exponent bits n, which is 0 for n = 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(x), 52));
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static QKV_INLINE Mask less(Number a, Number b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ) != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) {
    return _mm512_mask_blend_pd(m, b, a);
  }
  static QKV_INLINE unsigned bits_of(Mask m) { return m; }
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    return static_cast<Mask>(_mm_test_epi8_mask(b, _mm_set1_epi8(static_cast<char>(1 << bit))));
  }
};

/// 32-bit words, for random numbers.
struct Words {
  using Vector = __m512i;
  static constexpr int kLanes = 16;

  static QKV_INLINE Vector set(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static QKV_INLINE Vector load(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static QKV_INLINE void store(uint32_t* p, Vector x) { _mm512_storeu_si512(p, x); }
  static QKV_INLINE Vector exclusive_or(Vector a, Vector b, Vector c) {
    return _mm512_ternarylogic_epi32(a, b, c, 0x96);
  }
  /// The halves of the 64-bit products a · m.
  static QKV_INLINE void multiply(Vector a, uint32_t m, Vector& high, Vector& low) {
    const Vector even = _mm512_mul_epu32(a, set(m));
    const Vector odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), set(m));
    high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB);
    low = _mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CDAB);
  }
  /// Bits 2·w and 2·w + 1 of bytes[l]: is the low, the high half of lane l of x[w] at least
  /// threshold <= 65536?
  static QKV_INLINE void halves_at_least(const Vector (&x)[4], uint32_t threshold, uint8_t* bytes) {
    const Vector low_half = set(0xffff), least = set(threshold);
    __m128i bits = _mm_setzero_si128();
    for (int w = 0; w < 4; ++w) {
      const auto low = _mm512_cmpge_epu32_mask(_mm512_and_si512(x[w], low_half), least);
      const auto high = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[w], 16), least);
      bits = _mm_mask_add_epi8(bits, low, bits, _mm_set1_epi8(static_cast<char>(1 << 2 * w)));
      bits = _mm_mask_add_epi8(bits, high, bits, _mm_set1_epi8(static_cast<char>(2 << 2 * w)));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), bits);
  }
};

/// 64 bools to bits, byte b to bit b.
QKV_INLINE uint64_t bits_of_64_bools(const uint8_t* bools) {
  const __m512i x = _mm512_loadu_si512(bools);
  return _mm512_test_epi8_mask(x, x);
}

}  // namespace qkv::kernels::QKV_ISA
