#pragma once

#include "kernels/half.h"

// The mathematics of a softmax on vectors, and the Math of OnlineSoftmax.

namespace qkv::kernels::QKV_ISA {

/// exp(x) for x <= 0, or small enough for the result to be finite: 2^n · 2^r with n = round(x ·
/// log2 e), |r| <= 1/2.
///
/// float: minimax polynomial of degree 5 with c0 = 1, relative error 1.7e-7 with all roundings
/// near 0, growing with |x| to 1.3e-6 where the result is near the smallest float.
/// double: Taylor series of degree 13, truncation 4e-18.
/// exp(-inf) and everything that would be under the smallest number is exactly 0; NaN stays NaN.
template <class T>
QKV_INLINE typename Simd<T>::Number exp_of_nonpositive(typename Simd<T>::Number x) {
  using S = Simd<T>;
  const auto log2e = S::set(static_cast<T>(1.4426950408889634074));
  x = S::maximum(S::set(S::kExpZero), x);
  const auto n = S::round(x * log2e);
  const auto r = S::fma(x, log2e, S::zero() - n);
  typename S::Number power;
  if constexpr (sizeof(T) == 4) {
    power = S::fma(S::set(0.001326472731307149f), r, S::set(0.009671512991189957f));
    power = S::fma(power, r, S::set(0.05550733581185341f));
    power = S::fma(power, r, S::set(0.24022242426872253f));
    power = S::fma(power, r, S::set(0.6931470036506653f));
    power = S::fma(power, r, S::set(1.0f));
  } else {
    // (ln 2)^k / k!, k = 13 .. 0
    constexpr double kTaylor[] = {1.3691488853904128881e-12, 2.5678435993488205142e-11,
                                  4.4455382718708114975e-10, 7.0549116208011233301e-09,
                                  1.0178086009239699728e-07, 1.3215486790144309489e-06,
                                  1.5252733804059840281e-05, 1.5403530393381609954e-04,
                                  1.3333558146428443424e-03, 9.6181291076284771620e-03,
                                  5.5504108664821579953e-02, 2.4022650695910071233e-01,
                                  6.9314718055994530942e-01, 1.0};
    power = S::set(kTaylor[0]);
#pragma GCC unroll 13
    for (int k = 1; k < 14; ++k) power = S::fma(power, r, S::set(kTaylor[k]));
  }
  return S::scale_by_power_of_2(power, n);
}

/// |x|. NaN stays.
template <class T>
QKV_INLINE typename Simd<T>::Number absolute(typename Simd<T>::Number x) {
  return Simd<T>::maximum(Simd<T>::zero() - x, x);
}

/// tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x. Where that would cancel,
/// |x| < 5/8, Lambert's continued fraction (1761), cut off after 5 terms for float (relative
/// truncation 1e-9) and after 8 for double (1e-17).
template <class T>
QKV_INLINE typename Simd<T>::Number tanh_of(typename Simd<T>::Number x) {
  using S = Simd<T>;
  const auto one = S::set(T(1));
  const auto size = absolute<T>(x);
  const auto e = exp_of_nonpositive<T>(S::set(T(-2)) * size);
  const auto y = x * x;
  typename S::Number numerator, denominator;
  if constexpr (sizeof(T) == 4) {
    numerator = S::fma(y + S::set(105.0f), y, S::set(945.0f)) * x;
    denominator = S::fma(S::fma(S::set(15.0f), y, S::set(420.0f)), y, S::set(945.0f));
  } else {
    numerator = S::fma(S::set(36.0), y, S::set(6930.0));
    numerator = S::fma(numerator, y, S::set(270270.0));
    numerator = S::fma(numerator, y, S::set(2027025.0)) * x;
    denominator = S::fma(y + S::set(630.0), y, S::set(51975.0));
    denominator = S::fma(denominator, y, S::set(945945.0));
    denominator = S::fma(denominator, y, S::set(2027025.0));
  }
  const auto small = S::less(size, S::set(T(0.625)));
  const auto difference = S::select(S::less(x, S::zero()), e - one, one - e);
  return S::select(small, numerator, difference) / S::select(small, denominator, one + e);
}

/// A vector of numbers, from whatever they are stored as.
template <class T>
QKV_INLINE typename Simd<T>::Number load_stored(const T* x) {
  return Simd<T>::load(x);
}
template <class T>
QKV_INLINE typename Simd<T>::Number load_stored(const BFloat16* x) {
  return Simd<T>::load_bfloat16(&x->bits);
}
template <class T>
QKV_INLINE typename Simd<T>::Number load_stored(const Float16* x) {
  return Simd<T>::load_float16(&x->bits);
}

/// The same for every pair of types.
template <class T, class Stored>
QKV_INLINE typename Simd<T>::Number load_converted(const Stored* x) {
  if constexpr (sizeof(T) == 4 && sizeof(Stored) == 2) {
    return load_stored<T>(x);
  } else {
    alignas(64) T numbers[Simd<T>::kWidth];
    for (int l = 0; l < Simd<T>::kWidth; ++l) numbers[l] = static_cast<T>(x[l]);
    return Simd<T>::load(numbers);
  }
}

template <class T>
struct VectorMath {
  using S = Simd<T>;
  using Number = typename S::Number;
  using Mask = typename S::Mask;

  static QKV_INLINE Number zero() { return S::zero(); }
  static QKV_INLINE Number one() { return S::set(T(1)); }
  static QKV_INLINE Number slack() { return S::set(T(6)); }
  static QKV_INLINE Number minus_infinity() { return S::set(-static_cast<T>(__builtin_inff())); }
  static QKV_INLINE Number maximum(Number a, Number b) { return S::maximum(a, b); }
  static QKV_INLINE Number exp(Number x) { return exp_of_nonpositive<T>(x); }
  static QKV_INLINE Mask is_minus_infinity(Number x) { return S::equal(x, minus_infinity()); }
  static QKV_INLINE Mask is_zero(Number x) { return S::equal(x, zero()); }
  static QKV_INLINE Number select(Mask m, Number a, Number b) { return S::select(m, a, b); }
};

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float kLargest = __FLT_MAX__;
};
template <>
struct Limits<double> {
  static constexpr double kLargest = __DBL_MAX__;
};

QKV_INLINE float natural_exp(float x) { return __builtin_expf(x); }
QKV_INLINE double natural_exp(double x) { return __builtin_exp(x); }
QKV_INLINE float natural_log(float x) { return __builtin_logf(x); }
QKV_INLINE double natural_log(double x) { return __builtin_log(x); }

/// Numbers after the end are overwritten up to a whole vector.
template <class T>
inline void set_to_zero(T* x, int64_t size) {
  for (int64_t i = 0; i < size; i += Simd<T>::kWidth) Simd<T>::store(x + i, Simd<T>::zero());
}

template <class T>
inline T dot(const T* a, const T* b, int64_t size) {
  using S = Simd<T>;
  auto sum = S::zero();
  int64_t i = 0;
  for (; i + S::kWidth <= size; i += S::kWidth) sum = S::fma(S::load(a + i), S::load(b + i), sum);
  alignas(64) T lanes[S::kWidth];
  S::store(lanes, sum);
  T total = T(0);
  for (int l = 0; l < S::kWidth; ++l) total += lanes[l];
  for (; i < size; ++i) total += a[i] * b[i];
  return total;
}

}  // namespace qkv::kernels::QKV_ISA
