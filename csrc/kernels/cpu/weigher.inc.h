#pragma once

#include "kernels/cpu/math.inc.h"

// exp(score - shift), the weights of a vector of rows: what a forward tile makes of scores.

namespace qkv::kernels::QKV_ISA {

template <class Number, int kCount>
constexpr int count_of(const Number (&)[kCount]) {
  return kCount;
}

/// sum += x, weights of one vector of rows and a few keys
template <class Number, int kCount>
QKV_INLINE void add_few(const Number (&x)[kCount], Number& sum) {
#pragma GCC unroll 4
  for (const auto& weight : x) sum = sum + weight;
}

/// As exactly as T has them.
template <class T, class Exp = ExpOfNonpositive<T>>
class ExactWeigher {
 public:
  using S = Simd<T>;
  using Number = typename S::Number;
  static constexpr bool kSaturates = false;

  ExactWeigher() = default;
  QKV_INLINE ExactWeigher(Number shift, T /*scale*/) : shift_(shift) {}

  /// Whether such shifts suit replace_near.
  static QKV_INLINE bool is_near(Number) { return true; }

  /// x, scores of a few keys, becomes their weights.
  template <int kCount>
  QKV_INLINE void replace(Number (&x)[kCount]) const {
#pragma GCC unroll 4
    for (auto& score : x) score = score - shift_;
    Exp::replace(x);
  }
  template <int kCount>
  QKV_INLINE void replace_near(Number (&x)[kCount]) const {
    replace(x);
  }

 private:
  Number shift_;
};

/// Of scale · score, to within 3e-6, to be rounded to 16 bits next: as
/// 2^(score · (scale · log2 e) - shift · log2 e), of one operation instead of three.
/// Power::replace makes x 2^(x / Power::kUnits), with small numbers, -inf and NaN as in
/// ExpOfNonpositive; if Power::kSaturates, infinity of what is too large.
///
/// Rounding both products changes all weights of a row under this maximum by one factor, within
/// 2^-23 |shift| of 1. Outputs do not see it; but lse is off by it, and so are all weights
/// of a backward. Rows with larger shifts subtract first, as they must where the product overflows.
template <class Power>
class RoughWeigher {
 public:
  using S = Simd<float>;
  using Number = S::Number;
  static constexpr bool kSaturates = Power::kSaturates;

  RoughWeigher() = default;
  QKV_INLINE RoughWeigher(Number shift, float scale)
      : shift_(shift),
        minus_product_(shift * S::set(-kUnitsOfE)),
        scale_(S::set(scale)),
        factor_(S::set(scale * kUnitsOfE)),
        is_near_(is_near(shift)) {}

  static QKV_INLINE bool is_near(Number shift) {
    return !S::any_greater(absolute<float>(shift), S::set(kFarthest));
  }

  template <int kCount>
  QKV_INLINE void replace(Number (&x)[kCount]) const {
    if (is_near_) return replace_near(x);
    const auto is_far = S::less(S::set(kFarthest), absolute<float>(shift_));
    for (auto& score : x) {
      const auto near = S::fma(score, factor_, minus_product_);
      const auto far = rounded_product(score, scale_) - shift_;
      score = S::select(is_far, far * S::set(kUnitsOfE), near);
    }
    Power::replace(x);
  }
  template <int kCount>
  QKV_INLINE void replace_near(Number (&x)[kCount]) const {
#pragma GCC unroll 4
    for (auto& score : x) score = S::fma(score, factor_, minus_product_);
    Power::replace(x);
  }

 private:
  static constexpr float kUnitsOfE = Power::kUnits * 1.4426950408889634f;
  static constexpr float kFarthest = 0x1p10f;

  Number shift_;
  Number minus_product_;
  Number scale_;
  Number factor_;
  bool is_near_;
};

}  // namespace qkv::kernels::QKV_ISA
