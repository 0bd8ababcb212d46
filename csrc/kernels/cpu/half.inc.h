#pragma once

#include <stdint.h>

// The 16-bit types as they lie in memory. Nothing is computed in them.

namespace qkv::kernels::QKV_ISA {

/// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;

  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    __builtin_memcpy(&x, &wide, sizeof(x));
    return x;
  }
};

/// IEEE 754 binary16: 1 bit sign, 5 exponent, 10 mantissa.
struct Float16 {
  uint16_t bits;

  operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(bits & 0x7fff) << 13;  // in float32's fields
    float x;
    // Exponents are biased by 15 here and by 127 there; a product also puts subnormals right.
    __builtin_memcpy(&x, &rest, sizeof(x));
    x *= 0x1p112f;
    uint32_t wide;
    __builtin_memcpy(&wide, &x, sizeof(wide));
    if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;  // inf and NaN
    wide |= sign;
    __builtin_memcpy(&x, &wide, sizeof(x));
    return x;
  }
};

}  // namespace qkv::kernels::QKV_ISA
