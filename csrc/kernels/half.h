#pragma once

#include <stdint.h>

// The 16-bit types as they lie in memory. Nothing is computed in them.
//
// QKV_ISA names the namespace this is compiled into, so that no two instruction sets share code.

namespace qkv::kernels::QKV_ISA {

/// The upper half of a float32.
struct BFloat16 {
  static constexpr uint16_t kExponent = 0x7f80;  // all of it set: infinite or NaN

  uint16_t bits;

  QKV_INLINE operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    __builtin_memcpy(&x, &wide, sizeof(x));
    return x;
  }

  /// The nearest, and of two the even one.
  static QKV_INLINE BFloat16 rounded(float x) {
    uint32_t wide;
    __builtin_memcpy(&wide, &x, sizeof(wide));
    if (x != x) return {static_cast<uint16_t>(wide >> 16 | 0x40)};  // still NaN without its tail
    return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};

/// IEEE 754 binary16: 1 bit sign, 5 exponent, 10 mantissa.
struct Float16 {
  static constexpr uint16_t kExponent = 0x7c00;

  uint16_t bits;

  QKV_INLINE operator float() const {
#if defined(__CUDA_ARCH__)
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
#endif
    const int32_t size = bits & 0x7fff;
    // Exponents are biased by 15 here and by 127 there.
    uint32_t wide = (static_cast<uint32_t>(size) << 13) + (112u << 23);
    if (size >= 0x7c00) wide |= 0x7f800000;  // inf and NaN
    if (size < 0x400) {                      // 0 and subnormal numbers, which are not float32's
      const float x = static_cast<float>(size) * 0x1p-24f;
      __builtin_memcpy(&wide, &x, sizeof(wide));
    }
    wide |= static_cast<uint32_t>(bits & 0x8000) << 16;
    float x;
    __builtin_memcpy(&x, &wide, sizeof(x));
    return x;
  }

  /// The nearest, and of two the even one; infinite from 65520 on.
  static QKV_INLINE Float16 rounded(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t number;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(number) : "f"(x));
    return {number};
#endif
    uint32_t wide;
    __builtin_memcpy(&wide, &x, sizeof(wide));
    const uint32_t sign = wide >> 16 & 0x8000;
    wide &= 0x7fffffff;
    uint32_t rest;
    if (x != x) {
      rest = 0x7e00;
    } else if (wide >= 0x47800000) {  // 65536
      rest = 0x7c00;
    } else if (wide < 0x38800000) {  // 2^-14: subnormal, a multiple of 2^-24, which is the unit of
      float size;                    // the floats from 1/2 to 1
      __builtin_memcpy(&size, &wide, sizeof(size));
      size += 0.5f;
      __builtin_memcpy(&rest, &size, sizeof(rest));
      rest -= 0x3f000000;
    } else {
      rest = (wide - (112u << 23) + 0xfff + (wide >> 13 & 1)) >> 13;
    }
    return {static_cast<uint16_t>(sign | rest)};
  }
};

}  // namespace qkv::kernels::QKV_ISA
