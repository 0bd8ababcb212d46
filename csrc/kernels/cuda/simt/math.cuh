#pragma once

#include <stdint.h>

// Mathematical functions by names that float and double share, and what lanes of a warp compute
// together.

namespace qkv::kernels::simt {

template <class T>
QKV_DEVICE T infinity() {
  return static_cast<T>(__builtin_huge_valf());
}

QKV_DEVICE float natural_exp(float x) { return expf(x); }
QKV_DEVICE double natural_exp(double x) { return exp(x); }
QKV_DEVICE float natural_log(float x) { return logf(x); }
QKV_DEVICE double natural_log(double x) { return log(x); }
QKV_DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
QKV_DEVICE double hyperbolic_tangent(double x) { return tanh(x); }
QKV_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
QKV_DEVICE double maximum(double a, double b) { return fmax(a, b); }
QKV_DEVICE float minimum(float a, float b) { return a < b ? a : b; }  // NaN if b is
QKV_DEVICE double minimum(double a, double b) { return a < b ? a : b; }

/// The maximum, or sum, over kLanes neighbouring lanes, a power of two. All of them get it.
template <int kLanes, class T>
QKV_DEVICE T maximum_of_lanes(T x) {
  for (int bits = 1; bits < kLanes; bits *= 2) x = maximum(x, device::shuffle_xor(x, bits));
  return x;
}
template <int kLanes, class T>
QKV_DEVICE T sum_of_lanes(T x) {
  for (int bits = 1; bits < kLanes; bits *= 2) x += device::shuffle_xor(x, bits);
  return x;
}

/// What OnlineSoftmax computes with.
template <class T>
struct ScalarMath {
  using Number = T;
  static QKV_DEVICE T zero() { return T(0); }
  static QKV_DEVICE T one() { return T(1); }
  static QKV_DEVICE T slack() { return T(0); }
  static QKV_DEVICE T minus_infinity() { return -infinity<T>(); }
  static QKV_DEVICE T maximum(T a, T b) { return simt::maximum(a, b); }
  static QKV_DEVICE T exp(T x) { return natural_exp(x); }
  static QKV_DEVICE bool is_minus_infinity(T x) { return x == -infinity<T>(); }
  static QKV_DEVICE bool is_zero(T x) { return x == T(0); }
  static QKV_DEVICE T select(bool m, T a, T b) { return m ? a : b; }
};

}  // namespace qkv::kernels::simt
