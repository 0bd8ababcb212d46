#pragma once

#include <stdint.h>

// Vectors of 4 floats or 2 doubles in the compiler's own vector types: any processor. The
// interface is described in simd_avx512.h.

#define QKV_INLINE inline __attribute__((always_inline))

#include "kernels/half.h"

namespace qkv::kernels::generic {

template <class Real, class Integer>
struct VectorTypes {
  typedef Real Number __attribute__((vector_size(16)));
  typedef Integer Mask __attribute__((vector_size(16)));  // all bits of a lane set, or none
};

template <class T>
struct Simd;

template <class Real, class Integer, int kMantissaBits>
struct SimdOf {
  using Number = typename VectorTypes<Real, Integer>::Number;
  using Mask = typename VectorTypes<Real, Integer>::Mask;
  static constexpr int kWidth = 16 / sizeof(Real);
  static constexpr bool kLoadsFirst = false, kStoresFirst = false;
  static constexpr int kMostSums = 12;      // in registers
  static constexpr int kBroadcastRows = 4;  // 4 x 3 sums, 3 operands, 1 broadcast: 16
  static constexpr int kOuterVectors = 3;
  static constexpr int kOuterRows = 4;

  static QKV_INLINE Number zero() { return Number{}; }
  static QKV_INLINE Number set(Real x) { return x - Number{}; }  // keeps -0, inf and NaN
  static QKV_INLINE Number load(const Real* p) {
    Number x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static QKV_INLINE void store(Real* p, Number x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static QKV_INLINE Real sum(Number x) {
    Real total = 0;
    for (int lane = 0; lane < kWidth; ++lane) total += x[lane];
    return total;
  }
  static QKV_INLINE Number fma(Number a, Number b, Number c) { return a * b + c; }
  static QKV_INLINE Real fma(Real a, Real b, Real c) { return a * b + c; }
  static QKV_INLINE Number maximum(Number a, Number b) { return a > b ? a : b; }
  static QKV_INLINE Number minimum(Number a, Number b) { return a < b ? a : b; }
  static QKV_INLINE Number ratio(Number a, Number b) { return a / b; }
  /// From 1.5 · 2^(mantissa bits) + n, n >= 0: the number with exponent bits n, which is 0 for n =
  /// 0.
  static QKV_INLINE Number exponent_from_low_bits(Number x) {
    return reinterpret_cast<Number>(reinterpret_cast<Mask>(x) << kMantissaBits);
  }
  static QKV_INLINE Mask equal(Number a, Number b) { return a == b; }
  static QKV_INLINE Mask less(Number a, Number b) { return a < b; }
  static QKV_INLINE bool any_greater(Number a, Number b) {
    const Mask m = a > b;
    Integer any = 0;
    for (int lane = 0; lane < kWidth; ++lane) any |= m[lane];
    return any != 0;
  }
  static QKV_INLINE Number select(Mask m, Number a, Number b) { return m ? a : b; }
  static QKV_INLINE unsigned bits_of(Mask m) {
    unsigned bits = 0;
    for (int lane = 0; lane < kWidth; ++lane) bits |= static_cast<unsigned>(m[lane] & 1) << lane;
    return bits;
  }
  static QKV_INLINE Mask bit_of_bytes(const uint8_t* bytes, int bit) {
    Mask m{};
    for (int lane = 0; lane < kWidth; ++lane)
      m[lane] = -static_cast<Integer>(bytes[lane] >> bit & 1);
    return m;
  }
};

template <>
struct Simd<float> : SimdOf<float, int32_t, 23> {
  static QKV_INLINE Number load_bfloat16(const uint16_t* p) { return converted<BFloat16>(p); }
  static QKV_INLINE Number load_float16(const uint16_t* p) { return converted<Float16>(p); }
  static QKV_INLINE void store_bfloat16(uint16_t* p, Number x) {
    for (int lane = 0; lane < kWidth; ++lane) p[lane] = BFloat16::rounded(x[lane]).bits;
  }
  static QKV_INLINE void store_float16(uint16_t* p, Number x) {
    for (int lane = 0; lane < kWidth; ++lane) p[lane] = Float16::rounded(x[lane]).bits;
  }

 private:
  template <class Stored>
  static QKV_INLINE Number converted(const uint16_t* p) {
    Number x;
    for (int lane = 0; lane < kWidth; ++lane) x[lane] = Stored{p[lane]};
    return x;
  }
};

template <>
struct Simd<double> : SimdOf<double, int64_t, 52> {};

/// 32-bit words, for random numbers.
struct Words {
  static constexpr int kLanes = 4;
  struct Vector {
    uint32_t lane[kLanes];
  };

  static QKV_INLINE Vector set(uint32_t x) { return {{x, x, x, x}}; }
  static QKV_INLINE Vector load(const uint32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static QKV_INLINE void store(uint32_t* p, Vector x) {
    for (int l = 0; l < kLanes; ++l) p[l] = x.lane[l];
  }
  static QKV_INLINE Vector exclusive_or(Vector a, Vector b, Vector c) {
    for (int l = 0; l < kLanes; ++l) a.lane[l] ^= b.lane[l] ^ c.lane[l];
    return a;
  }
  /// The halves of the 64-bit products a · m.
  static QKV_INLINE void multiply(Vector a, uint32_t m, Vector& high, Vector& low) {
    for (int l = 0; l < kLanes; ++l) {
      const uint64_t product = static_cast<uint64_t>(a.lane[l]) * m;
      high.lane[l] = static_cast<uint32_t>(product >> 32);
      low.lane[l] = static_cast<uint32_t>(product);
    }
  }
  /// Bits 2·w and 2·w + 1 of bytes[l]: is the low, the high half of lane l of x[w] at least
  /// threshold <= 65536?
  static QKV_INLINE void halves_at_least(const Vector (&x)[4], uint32_t threshold, uint8_t* bytes) {
    for (int l = 0; l < kLanes; ++l) {
      unsigned bits = 0;
      for (int w = 0; w < 4; ++w) {
        bits |= static_cast<unsigned>((x[w].lane[l] & 0xffff) >= threshold) << 2 * w;
        bits |= static_cast<unsigned>((x[w].lane[l] >> 16) >= threshold) << (2 * w + 1);
      }
      bytes[l] = static_cast<uint8_t>(bits);
    }
  }
};

/// 64 bools to bits, byte b to bit b.
QKV_INLINE uint64_t bits_of_64_bools(const uint8_t* bools) {
  uint64_t bits = 0;
  for (int b = 0; b < 64; ++b) bits |= static_cast<uint64_t>(bools[b] != 0) << b;
  return bits;
}

}  // namespace qkv::kernels::generic
