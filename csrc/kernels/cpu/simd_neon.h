#pragma once

#include <arm_neon.h>
#include <stdint.h>

// Vectors of 4 floats or 2 doubles for 64-bit ARM; the interface is described in simd_avx512.h.

#define QKV_INLINE inline __attribute__((always_inline))

namespace qkv::kernels::neon {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  using Number = float32x4_t;
  using Mask = uint32x4_t;
  static constexpr int kWidth = 4;
  static constexpr bool kLoadsFirst = false, kStoresFirst = false;
  static constexpr int kMostSums = 24;      // in registers
  static constexpr int kBroadcastRows = 8;  // 8 x 3 sums, 3 operands: 27 of 32
  static constexpr int kOuterVectors = 4;   // and the shape for long rows of C
  static constexpr int kOuterRows = 6;

  static QKV_INLINE Number zero() { return vdupq_n_f32(0.0f); }
  static QKV_INLINE Number set(float x) { return vdupq_n_f32(x); }
  static QKV_INLINE Number load(const float* p) { return vld1q_f32(p); }
  static QKV_INLINE void store(float* p, Number x) { vst1q_f32(p, x); }
  static QKV_INLINE Number load_bfloat16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  static QKV_INLINE Number load_float16(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  static QKV_INLINE void store_bfloat16(uint16_t* p, Number x) {
    const uint32x4_t wide = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(wide, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(wide, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t nan = vorrq_u32(wide, vdupq_n_u32(0x400000));  // without its tail
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, nan), 16));
  }
  static QKV_INLINE void store_float16(uint16_t* p, Number x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
  }
  static QKV_INLINE float sum(Number x) { return vaddvq_f32(x); }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return vfmaq_f32(c, a, b); }
  static QKV_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static QKV_INLINE Number maximum(Number a, Number b) { return vmaxq_f32(a, b); }
  static QKV_INLINE Number minimum(Number a, Number b) { return vminq_f32(a, b); }
  static QKV_INLINE Number ratio(Number a, Number b) { return a / b; }
  /// From 1.5 · 2^23 + n, n >= 0: the number with exponent bits n, which is 0 for n = 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 23));
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return vceqq_f32(a, b); }
  static QKV_INLINE Mask less(Number a, Number b) { return vcltq_f32(a, b); }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    return vmaxvq_u32(vcgtq_f32(a, b)) != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) { return vbslq_f32(m, a, b); }
  static QKV_INLINE unsigned bits_of(Mask m) {
    const uint32_t bits[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(m, vld1q_u32(bits)));
  }
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    uint32_t four;
    __builtin_memcpy(&four, bytes, sizeof(four));
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vtstq_u32(vmovl_u16(vget_low_u16(wide)), vdupq_n_u32(1u << bit));
  }
};

template <>
struct Simd<double> {
  using Number = float64x2_t;
  using Mask = uint64x2_t;
  static constexpr int kWidth = 2;
  static constexpr bool kLoadsFirst = false, kStoresFirst = false;
  static constexpr int kMostSums = 24;
  static constexpr int kBroadcastRows = 8;
  static constexpr int kOuterVectors = 4;
  static constexpr int kOuterRows = 6;

  static QKV_INLINE Number zero() { return vdupq_n_f64(0.0); }
  static QKV_INLINE Number set(double x) { return vdupq_n_f64(x); }
  static QKV_INLINE Number load(const double* p) { return vld1q_f64(p); }
  static QKV_INLINE void store(double* p, Number x) { vst1q_f64(p, x); }
  static QKV_INLINE double sum(Number x) { return vaddvq_f64(x); }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return vfmaq_f64(c, a, b); }
  static QKV_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
  static QKV_INLINE Number maximum(Number a, Number b) { return vmaxq_f64(a, b); }
  static QKV_INLINE Number minimum(Number a, Number b) { return vminq_f64(a, b); }
  /// From 1.5 · 2^52 + n, n >= 0: the number with exponent bits n, which is 0 for n = 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return vreinterpretq_f64_u64(vshlq_n_u64(vreinterpretq_u64_f64(x), 52));
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return vceqq_f64(a, b); }
  static QKV_INLINE Mask less(Number a, Number b) { return vcltq_f64(a, b); }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    return vmaxvq_u32(vreinterpretq_u32_u64(vcgtq_f64(a, b))) != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) { return vbslq_f64(m, a, b); }
  static QKV_INLINE unsigned bits_of(Mask m) {
    return static_cast<unsigned>((vgetq_lane_u64(m, 0) & 1) | (vgetq_lane_u64(m, 1) & 2));
  }
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    const uint64x2_t both = vcombine_u64(vcreate_u64(bytes[0]), vcreate_u64(bytes[1]));
    return vtstq_u64(both, vdupq_n_u64(uint64_t(1) << bit));
  }
};

/// 32-bit words, for random numbers.
struct Words {
  using Vector = uint32x4_t;
  static constexpr int kLanes = 4;

  static QKV_INLINE Vector set(uint32_t x) { return vdupq_n_u32(x); }
  static QKV_INLINE Vector load(const uint32_t* p) { return vld1q_u32(p); }
  static QKV_INLINE void store(uint32_t* p, Vector x) { vst1q_u32(p, x); }
  static QKV_INLINE Vector exclusive_or(Vector a, Vector b, Vector c) {
    return veorq_u32(veorq_u32(a, b), c);
  }
  /// The halves of the 64-bit products a · m.
  static QKV_INLINE void multiply(Vector a, uint32_t m, Vector& high, Vector& low) {
    const Vector first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), m));
    const Vector last = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(a), m));
    low = vuzp1q_u32(first, last);
    high = vuzp2q_u32(first, last);
  }
  /// Bits 2·w and 2·w + 1 of bytes[l]: is the low, the high half of lane l of x[w] at least
  /// threshold <= 65536?
  static QKV_INLINE void halves_at_least(const Vector (&x)[4], uint32_t threshold, uint8_t* bytes) {
    Vector bits = set(0);
    for (int w = 0; w < 4; ++w) {
      const Vector low = vcgeq_u32(vandq_u32(x[w], set(0xffff)), set(threshold));
      const Vector high = vcgeq_u32(vshrq_n_u32(x[w], 16), set(threshold));
      bits = vorrq_u32(bits, vandq_u32(low, set(1u << 2 * w)));
      bits = vorrq_u32(bits, vandq_u32(high, set(2u << 2 * w)));
    }
    uint32_t lanes[kLanes];
    store(lanes, bits);
    for (int l = 0; l < kLanes; ++l) bytes[l] = static_cast<uint8_t>(lanes[l]);
  }
};

/// 64 bools, byte b to bit b.
QKV_INLINE uint64_t bits_of_64_bools(const uint8_t* bools) {
  uint64_t bits = 0;
  for (int b = 0; b < 64; ++b) bits |= static_cast<uint64_t>(bools[b] != 0) << b;
  return bits;
}

}  // namespace qkv::kernels::neon
