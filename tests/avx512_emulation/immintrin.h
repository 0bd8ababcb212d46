#pragma once

#include_next <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// AVX-512 in software, as much of it as the kernels use, so that a processor with AVX2 can test
// them: their sources include this in place of the system's <immintrin.h> and are compiled for
// AVX2. With QKV_EMULATES_BF16 there are AVX512-BF16 and AVX512-VNNI as well.
//
// These are functions in the kernels' own namespace, where they are found before those of the
// compiler, which has the same names for processors with AVX-512 only; vectors of 512 bits and
// operators on them it has for any. They give the bits that the instructions give according to
// Intel's manual with exceptions masked, numbers rounded to nearest and subnormal ones kept.

#ifdef QKV_EMULATES_BF16
#define __AVX512BF16__ 1
#endif

// Macros of clang, or of g++ where it does not optimise.
#undef _mm512_cmp_pd_mask
#undef _mm512_cmp_ps_mask
#undef _mm512_cmpeq_epi16_mask
#undef _mm512_cmpge_epu32_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_fpclass_ps_mask
#undef _mm512_mask_blend_epi16
#undef _mm512_reduce_ps
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#undef _mm512_slli_epi64
#undef _mm512_srli_epi32
#undef _mm512_srli_epi64
#undef _mm512_ternarylogic_epi32

// The compiler's would be found by the type of its last argument, _MM_PERM_ENUM.
#undef _mm512_mask_shuffle_epi32
#define _mm512_mask_shuffle_epi32 emulated_mask_shuffle_epi32

namespace qkv::kernels::QKV_ISA {

template <class T, int kBytes = 64>
using VectorOf __attribute__((vector_size(kBytes))) = T;

using Lanes8 = VectorOf<uint8_t>;
using Lanes16 = VectorOf<uint16_t>;
using Lanes32 = VectorOf<uint32_t>;
using Lanes64 = VectorOf<uint64_t>;
using FloatLanes = VectorOf<float>;
using DoubleLanes = VectorOf<double>;
using Lanes8In128 = VectorOf<uint8_t, 16>;
using Lanes16In256 = VectorOf<uint16_t, 32>;

// Lanes and masks.

template <class Vector>
constexpr int kLanesOf = sizeof(Vector) / sizeof(Vector{}[0]);

/// Bit l: is lane l of x another than 0?
template <class Vector>
uint64_t mask_of(Vector x) {
  uint64_t mask = 0;
  for (int l = 0; l < kLanesOf<Vector>; ++l) mask |= uint64_t{x[l] != 0} << l;
  return mask;
}

/// Lane l of x where bit l of the mask is set, else that of otherwise.
template <class Vector>
Vector select_lanes(uint64_t mask, Vector x, Vector otherwise) {
  for (int l = 0; l < kLanesOf<Vector>; ++l) {
    if ((mask >> l & 1) == 0) x[l] = otherwise[l];
  }
  return x;
}

/// Lanes whose bit is not set are zeros, and not read.
template <class Vector>
Vector load_lanes(uint64_t mask, const void* from) {
  Vector x = {};
  constexpr int kBytes = sizeof(x[0]);
  for (int l = 0; l < kLanesOf<Vector>; ++l) {
    if ((mask >> l & 1) == 0) continue;
    memcpy(reinterpret_cast<char*>(&x) + l * kBytes, static_cast<const char*>(from) + l * kBytes,
           kBytes);
  }
  return x;
}

template <class Vector>
void store_lanes(void* to, uint64_t mask, Vector x) {
  constexpr int kBytes = sizeof(x[0]);
  for (int l = 0; l < kLanesOf<Vector>; ++l) {
    if ((mask >> l & 1) == 0) continue;
    memcpy(static_cast<char*>(to) + l * kBytes, reinterpret_cast<const char*>(&x) + l * kBytes,
           kBytes);
  }
}

/// Lane l: lane index[l] of a and b after each other.
template <class Vector, class Index>
Vector permute_lanes(Vector a, Index index, Vector b) {
  constexpr int kLanes = kLanesOf<Vector>;
  Vector x;
  for (int l = 0; l < kLanes; ++l) {
    const int from = static_cast<int>(index[l] % (2 * kLanes));
    x[l] = from < kLanes ? a[from] : b[from - kLanes];
  }
  return x;
}

// Constants, loads, stores, casts.

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512d _mm512_setzero_pd() { return __m512d{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) {
  return __m512{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
inline __m512d _mm512_set1_pd(double x) { return __m512d{x, x, x, x, x, x, x, x}; }
inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(Lanes32{} + static_cast<uint32_t>(x)); }
inline __m512i _mm512_set1_epi16(short x) {
  return (__m512i)(Lanes16{} + static_cast<uint16_t>(x));
}
template <class... Int>
inline __m512i _mm512_set_epi32(Int... last_to_first) {
  const int lanes[16] = {last_to_first...};
  Lanes32 x;
  for (int l = 0; l < 16; ++l) x[l] = lanes[15 - l];
  return (__m512i)x;
}

inline __m512 _mm512_loadu_ps(const void* p) { return *static_cast<const __m512_u*>(p); }
inline __m512d _mm512_loadu_pd(const void* p) { return *static_cast<const __m512d_u*>(p); }
inline __m512i _mm512_loadu_si512(const void* p) { return *static_cast<const __m512i_u*>(p); }
inline void _mm512_storeu_ps(void* p, __m512 x) { *static_cast<__m512_u*>(p) = x; }
inline void _mm512_storeu_pd(void* p, __m512d x) { *static_cast<__m512d_u*>(p) = x; }
inline void _mm512_storeu_si512(void* p, __m512i x) { *static_cast<__m512i_u*>(p) = x; }

inline __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
inline __m512i _mm512_castpd_si512(__m512d x) { return (__m512i)x; }
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512d _mm512_castsi512_pd(__m512i x) { return (__m512d)x; }

// Arithmetic.

/// Half h, a vector of AVX2.
inline __m256& half(__m512& x, int h) { return reinterpret_cast<__m256*>(&x)[h]; }
inline __m256d& half(__m512d& x, int h) { return reinterpret_cast<__m256d*>(&x)[h]; }

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int h = 0; h < 2; ++h) half(c, h) = _mm256_fmadd_ps(half(a, h), half(b, h), half(c, h));
  return c;
}
inline __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(-a, b, c); }
inline __m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
  for (int h = 0; h < 2; ++h) half(c, h) = _mm256_fmadd_pd(half(a, h), half(b, h), half(c, h));
  return c;
}

/// 1 / x with a relative error below 2^-14; which bits follow is the processor's to choose.
inline __m512 _mm512_rcp14_ps(__m512 x) {
  const __m512 one = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return (__m512)((Lanes32)(one / x) & 0xfffffe00u);
}

// The second if one is NaN or both are zeros.
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
inline __m512d _mm512_max_pd(__m512d a, __m512d b) { return a > b ? a : b; }
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m512d _mm512_min_pd(__m512d a, __m512d b) { return a < b ? a : b; }

/// Upper and lower half, then again of what that gives.
template <class Vector>
auto sum_of_lanes(Vector x) {
  for (int step = kLanesOf<Vector> / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) x[l] += x[l + step];
  }
  return x[0];
}
inline __m256 _mm512_castps512_ps256(__m512 x) {
  __m256 parts[2];
  _mm512_storeu_ps(parts, x);
  return parts[0];
}
inline __m256 _mm512_extractf32x8_ps(__m512 x, int part) {
  __m256 parts[2];
  _mm512_storeu_ps(parts, x);
  return parts[part];
}
inline float _mm512_reduce_add_ps(__m512 x) { return sum_of_lanes((FloatLanes)x); }
inline double _mm512_reduce_add_pd(__m512d x) { return sum_of_lanes((DoubleLanes)x); }

/// x - floor(x), rounded down as well, so that it is less than 1 and -0 for integers; 0 for
/// infinity.
inline __m512 _mm512_reduce_ps(__m512 x, int how) {
  if (how != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) abort();
  __m512 rest;
  for (int l = 0; l < 16; ++l) {
    const float below = __builtin_floorf(x[l]);
    rest[l] = x[l] - below;
    // It is exact but for -1/2 < x < 0, where the way back is.
    if (rest[l] + below > x[l]) rest[l] = __builtin_nextafterf(rest[l], 0.0f);
    if (rest[l] == 0.0f) rest[l] = -0.0f;
    if (__builtin_isinf(x[l])) rest[l] = 0.0f;
  }
  return rest;
}

/// x · 2^floor(power), rounded once.
inline __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 power) {
  FloatLanes scaled;
  for (int l = 0; l < 16; ++l) {
    const float n = __builtin_floorf(power[l]);
    // By 2^300 or 2^-300 every finite float leaves its range, and none that of double.
    double factor = __builtin_ldexp(1.0, int(__builtin_fmaxf(-300, __builtin_fminf(n, 300))));
    if (__builtin_isinf(n)) factor = n > 0 ? n : 0.0;
    scaled[l] = static_cast<float>(x[l] * factor);
    if (x[l] == x[l] && n != n) scaled[l] = n;
    if (x[l] != x[l] && __builtin_isinf(n)) scaled[l] = static_cast<float>(factor);
  }
  return (__m512)select_lanes(mask, scaled, FloatLanes{});
}

inline __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((Lanes16)a + (Lanes16)b); }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Lanes32)a + (Lanes32)b); }
inline __m512i _mm512_mask_add_epi32(__m512i otherwise, __mmask16 mask, __m512i a, __m512i b) {
  return (__m512i)select_lanes(mask, (Lanes32)a + (Lanes32)b, (Lanes32)otherwise);
}
inline __m128i _mm_mask_add_epi8(__m128i otherwise, __mmask16 mask, __m128i a, __m128i b) {
  return (__m128i)select_lanes(mask, (Lanes8In128)a + (Lanes8In128)b, (Lanes8In128)otherwise);
}
/// Of the lower halves of 64 bits.
inline __m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  return (__m512i)(((Lanes64)a & 0xffffffff) * ((Lanes64)b & 0xffffffff));
}

// Bits.

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_min_epi32(__m512i a, __m512i b) {
  using Signed = VectorOf<int32_t>;
  const auto x = (Signed)a, y = (Signed)b;
  return (__m512i)(x < y ? x : y);
}
inline __m512i _mm512_max_epu16(__m512i a, __m512i b) {
  const auto x = (Lanes16)a, y = (Lanes16)b;
  return (__m512i)(x > y ? x : y);
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
/// Of table, the bit whose number the bits of a, b and c are.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i x = {};
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) x |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return x;
}
inline __m512i _mm512_slli_epi32(__m512i x, unsigned n) {
  return n < 32 ? (__m512i)((Lanes32)x << n) : __m512i{};
}
inline __m512i _mm512_srli_epi32(__m512i x, unsigned n) {
  return n < 32 ? (__m512i)((Lanes32)x >> n) : __m512i{};
}
inline __m512i _mm512_slli_epi64(__m512i x, unsigned n) {
  return n < 64 ? (__m512i)((Lanes64)x << n) : __m512i{};
}
inline __m512i _mm512_srli_epi64(__m512i x, unsigned n) {
  return n < 64 ? (__m512i)((Lanes64)x >> n) : __m512i{};
}

// Comparisons.

template <class Vector>
uint64_t compare_lanes(Vector a, Vector b, int how) {
  switch (how) {
    case _CMP_EQ_OQ:
      return mask_of(a == b);
    case _CMP_LT_OQ:
      return mask_of(a < b);
    case _CMP_GT_OQ:
      return mask_of(a > b);
    case _CMP_NLT_UQ:
      return mask_of(~(a < b));
    case _CMP_ORD_Q:
      return mask_of((a == a) & (b == b));
  }
  abort();
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  return static_cast<__mmask16>(compare_lanes((FloatLanes)a, (FloatLanes)b, how));
}
inline __mmask8 _mm512_cmp_pd_mask(__m512d a, __m512d b, int how) {
  return static_cast<__mmask8>(compare_lanes((DoubleLanes)a, (DoubleLanes)b, how));
}
/// Which are subnormal, the only kind that is asked for.
inline __mmask16 _mm512_fpclass_ps_mask(__m512 x, int /*kinds*/) {
  const Lanes32 bits = (Lanes32)x & 0x7fffffff;
  return static_cast<__mmask16>(mask_of((bits != 0) & (bits < 0x00800000)));
}
inline __mmask16 _mm512_cmpge_epu32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(mask_of((Lanes32)a >= (Lanes32)b));
}
inline __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
  return static_cast<__mmask32>(mask_of((Lanes16)a == (Lanes16)b));
}
inline __mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) { return mask_of((Lanes8)(a & b)); }
inline __mmask16 _mm_test_epi8_mask(__m128i a, __m128i b) {
  return static_cast<__mmask16>(mask_of((Lanes8In128)(a & b)));
}
/// The sign of every byte.
inline __mmask32 _mm256_movepi8_mask(__m256i x) {
  return static_cast<__mmask32>(_mm256_movemask_epi8(x));
}

// By masks.

inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  return (__m512)select_lanes(mask, (FloatLanes)b, (FloatLanes)a);
}
inline __m512d _mm512_mask_blend_pd(__mmask8 mask, __m512d a, __m512d b) {
  return (__m512d)select_lanes(mask, (DoubleLanes)b, (DoubleLanes)a);
}
inline __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
  return (__m512i)select_lanes(mask, (Lanes16)b, (Lanes16)a);
}
inline __m512i _mm512_maskz_mov_epi16(__mmask32 mask, __m512i x) {
  return (__m512i)select_lanes(mask, (Lanes16)x, Lanes16{});
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  return (__m512)load_lanes<FloatLanes>(mask, p);
}
inline __m512d _mm512_maskz_loadu_pd(__mmask8 mask, const void* p) {
  return (__m512d)load_lanes<DoubleLanes>(mask, p);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  return (__m512i)load_lanes<Lanes16>(mask, p);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  return (__m256i)load_lanes<Lanes16In256>(mask, p);
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 x) {
  store_lanes(p, mask, (FloatLanes)x);
}
inline void _mm512_mask_storeu_pd(void* p, __mmask8 mask, __m512d x) {
  store_lanes(p, mask, (DoubleLanes)x);
}
inline void _mm512_mask_storeu_epi32(void* p, __mmask16 mask, __m512i x) {
  store_lanes(p, mask, (Lanes32)x);
}
inline void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i x) {
  store_lanes(p, mask, (Lanes16In256)x);
}

// Permutations.

inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i x) {
  return (__m512i)permute_lanes((Lanes16)x, (Lanes16)index % 32, (Lanes16)x);
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return (__m512i)permute_lanes((Lanes16)a, (Lanes16)index, (Lanes16)b);
}
inline __m512i _mm512_permutexvar_epi32(__m512i index, __m512i x) {
  return (__m512i)permute_lanes((Lanes32)x, (Lanes32)index % 16, (Lanes32)x);
}
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return (__m512)permute_lanes((FloatLanes)a, (Lanes32)index, (FloatLanes)b);
}
/// In every quarter lanes of a and b in turn, of the lower or the upper half of its eight.
inline __m512i unpack_epi16(__m512i a, __m512i b, int first) {
  Lanes16 index;
  for (int l = 0; l < 32; ++l) index[l] = l % 2 * 32 + l / 8 * 8 + first + l % 8 / 2;
  return (__m512i)permute_lanes((Lanes16)a, index, (Lanes16)b);
}
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return unpack_epi16(a, b, 0); }
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return unpack_epi16(a, b, 4); }
/// In every quarter: those of its lanes that four pairs of bits name.
inline __m512i _mm512_mask_shuffle_epi32(__m512i otherwise, __mmask16 mask, __m512i x, int lanes) {
  Lanes32 index;
  for (int l = 0; l < 16; ++l) index[l] = l / 4 * 4 + (lanes >> l % 4 * 2 & 3);
  const Lanes32 shuffled = permute_lanes((Lanes32)x, index, (Lanes32)x);
  return (__m512i)select_lanes(mask, shuffled, (Lanes32)otherwise);
}
/// Two quarters of a and then two of b, by four pairs of bits.
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int quarters) {
  Lanes32 index;
  for (int l = 0; l < 16; ++l) index[l] = l / 8 * 16 + (quarters >> l / 4 * 2 & 3) * 4 + l % 4;
  return (__m512i)permute_lanes((Lanes32)a, index, (Lanes32)b);
}

// Conversions.

inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  return (__m512i) __builtin_convertvector((Lanes16In256)x, Lanes32);
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
  return (__m256i) __builtin_convertvector((Lanes32)x, Lanes16In256);
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
  const __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                           _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  return _mm512_loadu_ps(parts);
}
inline __m256i _mm512_cvtps_ph(__m512 x, int how) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  if (how != kNearest) abort();
  __m256 parts[2];
  _mm512_storeu_ps(parts, x);
  return _mm256_set_m128i(_mm256_cvtps_ph(parts[1], kNearest), _mm256_cvtps_ph(parts[0], kNearest));
}

// AVX512-VNNI.

inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  using Signed = VectorOf<int32_t>;
  const auto even = [](__m512i x) { return (Lanes32)((Signed)((Lanes32)x << 16) >> 16); };
  const auto odd = [](__m512i x) { return (Lanes32)((Signed)x >> 16); };
  return (__m512i)((Lanes32)sum + even(a) * even(b) + odd(a) * odd(b));
}

// AVX512-BF16: subnormal numbers count as zeros and become zeros.

inline __m512 without_subnormals(__m512 x) {
  const auto bits = (Lanes32)x;
  return (__m512)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}
/// In the lower halves.
inline Lanes32 rounded_to_bfloat16(__m512 x) {
  const auto bits = (Lanes32)without_subnormals(x);
  return (x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
  return (__m256bh)_mm512_cvtepi32_epi16((__m512i)rounded_to_bfloat16(x));
}
/// Those of b come first.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  const __m256bh halves[2] = {_mm512_cvtneps_pbh(b), _mm512_cvtneps_pbh(a)};
  return (__m512bh)_mm512_loadu_si512(halves);
}
/// The manual's loop adds the odd product first, and has "the accumulation of the FMA" rounded:
/// each product is fused with its addition.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto even = [](__m512bh x) { return without_subnormals((__m512)((Lanes32)x << 16)); };
  const auto odd = [](__m512bh x) { return without_subnormals((__m512)((Lanes32)x & 0xffff0000)); };
  sum = without_subnormals(_mm512_fmadd_ps(odd(a), odd(b), without_subnormals(sum)));
  return without_subnormals(_mm512_fmadd_ps(even(a), even(b), sum));
}

}  // namespace qkv::kernels::QKV_ISA
