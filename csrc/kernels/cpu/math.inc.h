#pragma once

#include "kernels/half.h"
#include "kernels/params.h"

// The mathematics of a softmax on vectors, and the Math of OnlineSoftmax.

// Compiled once, however many callers there are: the compiler would copy it into each.
#define QKV_ONE_COPY __attribute__((noinline))

namespace qkv::kernels::QKV_ISA {

template <class T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  // The last bit of a float of this size is worth 1: adding it rounds x to an integer n and leaves
  // n + 90 in the low bits.
  static constexpr float kRounding = 0x1.8p23f + 90;
  static constexpr float kZero = -62.6f;   // n = -90: exp(x) is exactly 0 from here down
  static constexpr float kScale = 0x1p37;  // as a float with the exponent bits n + 90 is 2^(n - 37)
  // 2^-r for |r| <= 1/2: minimax with c0 = 1.
  static constexpr float kPower[] = {-0.001326472731307149f, 0.009671512991189957f,
                                     -0.05550733581185341f,  0.24022242426872253f,
                                     -0.6931470036506653f,   1.0f};
};
template <>
struct ExpConstants<double> {
  static constexpr double kRounding = 0x1.8p52 + 900;
  static constexpr double kZero = -624.1;
  static constexpr double kScale = 0x1p123;
  // (-ln 2)^k / k!, k = 13 .. 0
  static constexpr double kPower[] = {-1.3691488853904128e-12, 2.5678435993488206e-11,
                                      -4.4455382738708113e-10, 7.054911620801123e-09,
                                      -1.01780860092397e-07,   1.321548679014431e-06,
                                      -1.5252733804059841e-05, 0.0001540353039338161,
                                      -0.0013333558146428443,  0.009618129107628477,
                                      -0.05550410866482158,    0.24022650695910072,
                                      -0.6931471805599453,     1.0};
};

/// x = 2^n · 2^-x, with n + 90 (double: + 900) in the low bits of `rounded`: a polynomial in x.
template <class T, int kTerms, int kCount>
QKV_INLINE void multiply_powers(const T (&terms)[kTerms],
                                const typename Simd<T>::Number (&rounded)[kCount],
                                typename Simd<T>::Number (&x)[kCount]) {
  using S = Simd<T>;
  constexpr T kScale = ExpConstants<T>::kScale;
  typename S::Number power[kCount];
#pragma GCC unroll 8
  for (auto& y : power) y = S::set(terms[0] * kScale);
#pragma GCC unroll 13
  for (int k = 1; k < kTerms; ++k) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) power[i] = S::fma(power[i], x[i], S::set(terms[k] * kScale));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = power[i] * S::exponent_from_low_bits(rounded[i]);
}

/// exp(x) for x <= 0, or small enough for the result to be finite: 2^n · 2^-r with n = round(x ·
/// log2 e), r = n - x · log2 e. exp(-inf), and everything under 2^-90 (double: 2^-900), is exactly
/// 0; NaN stays NaN.
///
/// So what an exponential is multiplied with can be as small as 2^-36, a gradient say, before a
/// product is subnormal, which costs some processors more than a hundred cycles each time. A weight
/// this far below the largest is lost in any sum of weights.
///
/// float: relative error 1.7e-7 with all roundings near 0, growing with |x| to 1e-6.
/// double: Taylor series of degree 13, truncation 4e-18.
template <class T>
struct ExpOfNonpositive {
  using S = Simd<T>;

  /// Of several at once, step by step: each step waits for the one before it.
  template <int kCount>
  static QKV_INLINE void replace(typename S::Number (&x)[kCount]) {
    using Constants = ExpConstants<T>;
    constexpr auto kLog2E = static_cast<T>(1.4426950408889634074);
    typename S::Number rounded[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      x[i] = S::maximum(S::set(Constants::kZero), x[i]);
      rounded[i] = S::fma(x[i], S::set(kLog2E), S::set(Constants::kRounding));
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const auto n = rounded[i] - S::set(Constants::kRounding);
      x[i] = S::fma(x[i], S::set(-kLog2E), n);
    }
    multiply_powers<T>(Constants::kPower, rounded, x);
  }
};

template <class T>
QKV_INLINE typename Simd<T>::Number exp_of_nonpositive(typename Simd<T>::Number x) {
  typename Simd<T>::Number one[1] = {x};
  ExpOfNonpositive<T>::replace(one);
  return one[0];
}

/// log(x) of 0, of numbers >= 2^-126, of inf and NaN: n · ln 2 + 2 · artanh(s) with x = 2^n · m,
/// √½ <= m < √2 and s = (m - 1) / (m + 1). The series of artanh is cut off after s^9: truncation
/// 3e-9, relative error 1.8e-7 with all roundings.
QKV_INLINE Simd<float>::Number log_of_nonnegative(Simd<float>::Number x) {
  using S = Simd<float>;
  typedef int32_t Integers __attribute__((vector_size(sizeof(S::Number))));
  typedef float Floats __attribute__((vector_size(sizeof(S::Number))));
  constexpr int32_t kBitsOfRootOfHalf = 0x3f3504f3;
  const auto bits = (Integers)x, exponent = (bits - kBitsOfRootOfHalf) >> 23;
  const auto n = (S::Number) __builtin_convertvector(exponent, Floats);
  const auto m = (S::Number)(bits - (exponent << 23)), one = S::set(1.0f);
  const auto s = (m - one) / (m + one), z = s * s;
  auto series = S::fma(S::set(2.0f / 9), z, S::set(2.0f / 7));
  series = S::fma(series, z, S::set(2.0f / 5));
  series = S::fma(series, z, S::set(2.0f / 3));
  const auto log = S::fma(n, S::set(0.6931471805599453f), S::fma(series * z, s, s + s));
  const auto minus_infinity = S::set(-__builtin_inff());
  const auto of_finite = S::select(S::equal(x, S::zero()), minus_infinity, log);
  return S::select(S::equal(x - x, S::zero()), of_finite, x);
}
QKV_INLINE Simd<double>::Number log_of_nonnegative(Simd<double>::Number x) {
  using S = Simd<double>;
  alignas(64) double lanes[S::kWidth];
  S::store(lanes, x);
  for (double& lane : lanes) lane = __builtin_log(lane);
  return S::load(lanes);
}

/// a · b, rounded, also if something is added to it next: the compiler makes one operation of a
/// product and a sum, but none of these two. So a score has the same bits wherever it is scaled.
QKV_INLINE Simd<float>::Number rounded_product(Simd<float>::Number a, Simd<float>::Number b) {
  return Simd<float>::fma(a, b, Simd<float>::zero());
}

/// |x|. NaN stays.
template <class T>
QKV_INLINE typename Simd<T>::Number absolute(typename Simd<T>::Number x) {
  return Simd<T>::maximum(Simd<T>::zero() - x, x);
}

/// The softcap, x -> c · tanh(x / c). NaN stays NaN, and far from 0 it is c exactly.
template <class T>
struct Softcap;

template <class T>
struct SoftcapConstants {
  using S = Simd<T>;
  T cap, inverse;

  explicit SoftcapConstants(T c) : cap(c), inverse(T(1) / c), inverse_from_above_(inverse) {
    inverse_from_above_ += inverse * (sizeof(T) == 4 ? T(0x1p-23) : T(0x1p-52));
  }

  /// The derivative, 1 - tanh², from the result: 0 exactly where that is c, as a second derivative
  /// is this times 2 / c.
  QKV_INLINE typename S::Number slope(typename S::Number capped) const {
    const auto tanh = capped * S::set(inverse_from_above_);
    return S::maximum(S::zero(), S::fma(S::zero() - tanh, tanh, S::set(T(1))));
  }

 private:
  T inverse_from_above_;  // c times this is not less than 1, however it is rounded
};

/// tanh(z) = z · P(z²) / Q(z²), minimax of the relative error up to 9.02: truncation 2.1e-8, 4.3e-7
/// with all roundings. (Lawson's algorithm on the linearised error.) From there on it grows, to 1 +
/// 1e-6 at z² = 96, which is more than roundings take from it: cut off at 1, it is 1 from there on.
template <>
struct Softcap<float> : SoftcapConstants<float> {
  static constexpr float kLargestSquare = 96;
  static constexpr float kNumerator[] = {1.331926604e-8f, 2.058363693e-5f, 3.494044733e-3f,
                                         0.1337972676f, 0.9999999791f};
  static constexpr float kDenominator[] = {7.762103431e-7f, 3.283108966e-4f, 2.587111268e-2f,
                                           0.4671304202f, 1.0f};

  using SoftcapConstants::SoftcapConstants;

  QKV_INLINE S::Number operator()(S::Number x) const {
    const auto z = x * S::set(inverse), y = S::minimum(z * z, S::set(kLargestSquare));
    auto numerator = S::set(kNumerator[0]), denominator = S::set(kDenominator[0]);
#pragma GCC unroll 4
    for (int k = 1; k < 5; ++k) {
      numerator = S::fma(numerator, y, S::set(kNumerator[k]));
      denominator = S::fma(denominator, y, S::set(kDenominator[k]));
    }
    const auto capped = S::ratio(x * numerator, denominator);
    return S::minimum(S::set(cap), S::maximum(S::set(-cap), capped));
  }
};

/// tanh(z) = (1 - e) / (1 + e) with e = exp(-2 |z|), and the sign of z. Where that would cancel,
/// |z| < 5/8, Lambert's continued fraction (1761), cut off after 8 terms: truncation 1e-17.
template <>
struct Softcap<double> : SoftcapConstants<double> {
  using SoftcapConstants::SoftcapConstants;

  QKV_INLINE S::Number operator()(S::Number x) const {
    const auto one = S::set(1.0), z = x * S::set(inverse), y = z * z;
    const auto size = absolute<double>(z);
    const auto e = exp_of_nonpositive<double>(S::set(-2.0) * size);
    auto numerator = S::fma(S::set(36.0), y, S::set(6930.0));
    numerator = S::fma(numerator, y, S::set(270270.0));
    numerator = S::fma(numerator, y, S::set(2027025.0)) * z;
    auto denominator = S::fma(y + S::set(630.0), y, S::set(51975.0));
    denominator = S::fma(denominator, y, S::set(945945.0));
    denominator = S::fma(denominator, y, S::set(2027025.0));
    const auto small = S::less(size, S::set(0.625));
    const auto difference = S::select(S::less(z, S::zero()), e - one, one - e);
    const auto tanh =
        S::select(small, numerator, difference) / S::select(small, denominator, one + e);
    return S::set(cap) * tanh;
  }
};

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

/// The first `count` of them, then zeros; what lies after them is not read.
template <class T, class Stored>
QKV_INLINE typename Simd<T>::Number load_first(const Stored* x, int64_t count) {
  using S = Simd<T>;
  if constexpr (!S::kLoadsFirst) {
    alignas(64) Stored line[S::kWidth] = {};
    for (int64_t l = 0; l < count; ++l) line[l] = x[l];
    return load_stored<T>(line);
  } else if constexpr (sizeof(Stored) == sizeof(T)) {
    return S::load_first(x, count);
  } else if constexpr (Stored::kExponent == BFloat16::kExponent) {
    return S::load_first_bfloat16(&x->bits, count);
  } else {
    return S::load_first_float16(&x->bits, count);
  }
}

/// A vector of numbers, each rounded to the nearest that can be stored, of two the even one.
template <class T>
QKV_INLINE void store_rounded(BFloat16* to, typename Simd<T>::Number x) {
  Simd<T>::store_bfloat16(&to->bits, x);
}
template <class T>
QKV_INLINE void store_rounded(Float16* to, typename Simd<T>::Number x) {
  Simd<T>::store_float16(&to->bits, x);
}

/// Calls f with a number (0) of the type that numbers are stored in.
template <class T, class F>
QKV_INLINE void with_stored(Storage storage, F f) {
  if constexpr (sizeof(T) == 4) {
    if (storage == Storage::kBFloat16) return f(BFloat16{});
    if (storage == Storage::kFloat16) return f(Float16{});
  }
  f(T(0));
}

/// Nothing is lost if a number is stored as it is.
template <class T>
QKV_INLINE void store_rounded(T* to, typename Simd<T>::Number x) {
  Simd<T>::store(to, x);
}
template <class Stored, class T>
QKV_INLINE Stored rounded(T x) {
  if constexpr (sizeof(Stored) == 2) {
    return Stored::rounded(x);
  } else {
    return x;
  }
}

/// The first `count` of x, rounded if they are stored in 16 bits; nothing after them is written.
template <class T, class Stored>
QKV_INLINE void store_first(Stored* to, typename Simd<T>::Number x, int64_t count) {
  using S = Simd<T>;
  if constexpr (S::kStoresFirst && sizeof(Stored) == sizeof(T)) {
    S::store_first(to, x, count);
  } else {
    alignas(64) Stored line[S::kWidth];
    store_rounded<T>(line, x);
    if constexpr (S::kStoresFirst) {
      S::store_first_halves(&to->bits, &line->bits, count);
    } else {
      for (int64_t l = 0; l < count; ++l) to[l] = line[l];
    }
  }
}

/// A vector of numbers from what may be stored as any of the types.
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

/// The first `count` of them, then zeros; what lies after them is not read.
template <class T, class Stored>
QKV_INLINE typename Simd<T>::Number load_first_converted(const Stored* x, int64_t count) {
  if constexpr (sizeof(Stored) == sizeof(T) || (sizeof(T) == 4 && sizeof(Stored) == 2)) {
    return load_first<T>(x, count);
  } else {
    alignas(64) T numbers[Simd<T>::kWidth] = {};
    for (int64_t l = 0; l < count; ++l) numbers[l] = static_cast<T>(x[l]);
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
  /// Weights are up to 6e4 then, which float16 still holds.
  static QKV_INLINE Number slack() { return S::set(T(11)); }
  /// exp(slack) less a thousandth: what is above the slack has a weight above this.
  static QKV_INLINE Number almost_exp_of_slack() { return S::set(T(59814)); }
  static QKV_INLINE Number minus_infinity() { return S::set(-static_cast<T>(__builtin_inff())); }
  static QKV_INLINE Number maximum(Number a, Number b) { return S::maximum(a, b); }
  static QKV_INLINE Number exp(Number x) { return exp_of_nonpositive<T>(x); }
  static QKV_INLINE Number log(Number x) { return log_of_nonnegative(x); }
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

template <class T>
constexpr int64_t round_up_to_vector(int64_t x) {
  return (x + Simd<T>::kWidth - 1) / Simd<T>::kWidth * Simd<T>::kWidth;
}

/// Whole lines of a cache.
inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// Numbers after the end are overwritten up to a whole vector.
template <class T>
inline void set_to_zero(T* x, int64_t size) {
  for (int64_t i = 0; i < size; i += Simd<T>::kWidth) Simd<T>::store(x + i, Simd<T>::zero());
}

template <class T, class Stored>
inline T dot(const Stored* a, const T* b, int64_t size) {
  using S = Simd<T>;
  auto sum = S::zero();
  int64_t i = 0;
  for (; i + S::kWidth <= size; i += S::kWidth) {
    sum = S::fma(load_stored<T>(a + i), S::load(b + i), sum);
  }
  if (i < size) sum = S::fma(load_first<T>(a + i, size - i), load_first<T>(b + i, size - i), sum);
  return S::sum(sum);
}

/// <grad, out>, as exact as `out` was before it was rounded to 16 bits, which took `rest` from it.
template <class T, class Stored>
inline T dot_with_exact(const Stored* grad, const Stored* out, const Stored* rest, int64_t width) {
  if constexpr (sizeof(Stored) == sizeof(T)) {
    return dot<T>(grad, out, width);
  } else {
    using S = Simd<T>;
    auto sum = S::zero();
    int64_t d = 0;
    for (; d + S::kWidth <= width; d += S::kWidth) {
      const auto exact = load_stored<T>(out + d) + load_stored<T>(rest + d);
      sum = S::fma(load_stored<T>(grad + d), exact, sum);
    }
    if (d < width) {
      const auto exact = load_first<T>(out + d, width - d) + load_first<T>(rest + d, width - d);
      sum = S::fma(load_first<T>(grad + d, width - d), exact, sum);
    }
    return S::sum(sum);
  }
}

}  // namespace qkv::kernels::QKV_ISA
