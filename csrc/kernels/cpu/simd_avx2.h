#pragma once

#include <immintrin.h>
#include <stdint.h>

// Vectors of 8 floats or 4 doubles; the interface is described in simd_avx512.h.

#define QKV_INLINE inline __attribute__((always_inline))

namespace qkv::kernels::avx2 {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  using Number = __m256;
  using Mask = __m256;
  static constexpr int kWidth = 8;
  static constexpr bool kLoadsFirst = true, kStoresFirst = false;  // by a mask: not tried
  static constexpr int kMostSums = 12;                             // in registers
  static constexpr int kBroadcastRows = 4;  // 4 x 3 sums, 3 operands, 1 broadcast: 16
  static constexpr int kOuterVectors = 3;   // and the shape for long rows of C
  static constexpr int kOuterRows = 4;

  static QKV_INLINE Number zero() { return _mm256_setzero_ps(); }
  static QKV_INLINE Number set(float x) { return _mm256_set1_ps(x); }
  static QKV_INLINE Number load(const float* p) { return _mm256_loadu_ps(p); }
  static QKV_INLINE Number load_first(const float* p, int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p,
                              _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane));
  }
  static QKV_INLINE void store(float* p, Number x) { _mm256_storeu_ps(p, x); }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return _mm256_fmadd_ps(a, b, c); }
  static QKV_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static QKV_INLINE Number load_bfloat16(const uint16_t* p) {
    return widen_bfloat16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static QKV_INLINE Number load_float16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static QKV_INLINE Number load_first_bfloat16(const uint16_t* p, int64_t count) {
    return widen_bfloat16(first_halves(p, count));
  }
  static QKV_INLINE Number load_first_float16(const uint16_t* p, int64_t count) {
    return _mm256_cvtph_ps(first_halves(p, count));
  }
  static QKV_INLINE void store_bfloat16(uint16_t* p, Number x) {
    const __m256i wide = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_or_si256(wide, _mm256_set1_epi32(0x400000));  // without its tail
    const __m256i rounded = _mm256_blendv_epi8(
        nan, _mm256_add_epi32(wide, half), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q)));
    const __m256i halves = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_packus_epi32(halves, halves);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
  }
  static QKV_INLINE void store_float16(uint16_t* p, Number x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static QKV_INLINE float sum(Number x) {
    const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
  }
  static QKV_INLINE Number maximum(Number a, Number b) { return _mm256_max_ps(a, b); }
  static QKV_INLINE Number minimum(Number a, Number b) { return _mm256_min_ps(a, b); }
  static QKV_INLINE Number ratio(Number a, Number b) { return a / b; }
  /// From 1.5 · 2^23 + n, n >= 0: the number with exponent bits n, which is 0 for n = 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static QKV_INLINE Mask less(Number a, Number b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) { return _mm256_blendv_ps(b, a, m); }
  static QKV_INLINE unsigned bits_of(Mask m) {
    return static_cast<unsigned>(_mm256_movemask_ps(m));
  }
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    const __m256i selected = _mm256_set1_epi32(1 << bit);
    const __m256i b =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(b, selected), selected));
  }

 private:
  static QKV_INLINE Number widen_bfloat16(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  /// Through registers: a vector does not wait for them to be stored one by one.
  static QKV_INLINE __m128i first_halves(const uint16_t* p, int64_t count) {
    uint64_t of_four[2] = {0, 0};
    for (int l = 0; l < 4 && l < count; ++l) of_four[0] |= uint64_t{p[l]} << 16 * l;
    for (int l = 4; l < count; ++l) of_four[1] |= uint64_t{p[l]} << 16 * (l - 4);
    return _mm_set_epi64x(static_cast<int64_t>(of_four[1]), static_cast<int64_t>(of_four[0]));
  }
};

template <>
struct Simd<double> {
  using Number = __m256d;
  using Mask = __m256d;
  static constexpr int kWidth = 4;
  static constexpr bool kLoadsFirst = true, kStoresFirst = false;  // by a mask: not tried
  static constexpr int kMostSums = 12;
  static constexpr int kBroadcastRows = 4;
  static constexpr int kOuterVectors = 3;
  static constexpr int kOuterRows = 4;

  static QKV_INLINE Number zero() { return _mm256_setzero_pd(); }
  static QKV_INLINE Number set(double x) { return _mm256_set1_pd(x); }
  static QKV_INLINE Number load(const double* p) { return _mm256_loadu_pd(p); }
  static QKV_INLINE Number load_first(const double* p, int64_t count) {
    const __m256i lane = _mm256_setr_epi64x(0, 1, 2, 3);
    return _mm256_maskload_pd(p, _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), lane));
  }
  static QKV_INLINE void store(double* p, Number x) { _mm256_storeu_pd(p, x); }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return _mm256_fmadd_pd(a, b, c); }
  static QKV_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
  static QKV_INLINE double sum(Number x) {
    const __m128d two = _mm256_castpd256_pd128(x) + _mm256_extractf128_pd(x, 1);
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
  }
  static QKV_INLINE Number maximum(Number a, Number b) { return _mm256_max_pd(a, b); }
  static QKV_INLINE Number minimum(Number a, Number b) { return _mm256_min_pd(a, b); }
  /// From 1.5 · 2^52 + n, n >= 0: the number with exponent bits n, which is 0 for n = 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(x), 52));
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  static QKV_INLINE Mask less(Number a, Number b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    return _mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_GT_OQ)) != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) { return _mm256_blendv_pd(b, a, m); }
  static QKV_INLINE unsigned bits_of(Mask m) {
    return static_cast<unsigned>(_mm256_movemask_pd(m));
  }
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    int32_t four;
    __builtin_memcpy(&four, bytes, sizeof(four));
    const __m256i selected = _mm256_set1_epi64x(1 << bit);
    const __m256i b = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(b, selected), selected));
  }
};

/// 32-bit words, for random numbers.
struct Words {
  using Vector = __m256i;
  static constexpr int kLanes = 8;

  static QKV_INLINE Vector set(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static QKV_INLINE Vector load(const uint32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static QKV_INLINE void store(uint32_t* p, Vector x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
  static QKV_INLINE Vector exclusive_or(Vector a, Vector b, Vector c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
  }
  /// The halves of the 64-bit products a · m.
  static QKV_INLINE void multiply(Vector a, uint32_t m, Vector& high, Vector& low) {
    const Vector even = _mm256_mul_epu32(a, set(m));
    const Vector odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), set(m));
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  }
  /// Bits 2·w and 2·w + 1 of bytes[l]: is the low, the high half of lane l of x[w] at least
  /// threshold <= 65536?
  static QKV_INLINE void halves_at_least(const Vector (&x)[4], uint32_t threshold, uint8_t* bytes) {
    const Vector low_half = set(0xffff), below = set(threshold - 1);
    Vector bits = _mm256_setzero_si256();
    for (int w = 0; w < 4; ++w) {
      const Vector low = _mm256_cmpgt_epi32(_mm256_and_si256(x[w], low_half), below);
      const Vector high = _mm256_cmpgt_epi32(_mm256_srli_epi32(x[w], 16), below);
      bits = _mm256_or_si256(bits, _mm256_and_si256(low, set(1u << 2 * w)));
      bits = _mm256_or_si256(bits, _mm256_and_si256(high, set(2u << 2 * w)));
    }
    uint32_t lanes[kLanes];
    store(lanes, bits);
    for (int l = 0; l < kLanes; ++l) bytes[l] = static_cast<uint8_t>(lanes[l]);
  }
};

/// 64 bools to bits, byte b to bit b.
QKV_INLINE uint64_t bits_of_64_bools(const uint8_t* bools) {
  const auto of_32 = [](const uint8_t* p) __attribute__((always_inline)) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return ~static_cast<uint32_t>(
        _mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())));
  };
  return of_32(bools) | static_cast<uint64_t>(of_32(bools + 32)) << 32;
}

}  // namespace qkv::kernels::avx2
