#pragma once

// The state of a softmax that sees its scores block by block (Milakov & Gimelshein, 2018,
// arXiv:1805.02867, algorithm 3; used for attention by FlashAttention, arXiv:2205.14135).
//
//   max  = max of the kept scores so far, or up to `slack` less; -inf while there are none
//   sum  = sum of exp(score - max) so far
//
// Number is a float on a GPU, a vector with one query per lane on a CPU. Math supplies
//   exp(x) for x <= slack (exp(-inf) = 0 exactly, NaN stays), maximum, select, is_minus_infinity,
//   is_zero, minus_infinity, zero, one.

namespace qkv::kernels::QKV_ISA {

template <class Math>
struct OnlineSoftmax {
  using Number = typename Math::Number;

  Number max;
  Number sum;

  QKV_INLINE void clear() {
    max = Math::minus_infinity();
    sum = Math::zero();
  }

  /// Takes in the maximum of the next block. Returns exp(old max - new max), the factor that
  /// everything summed so far has to be multiplied with.
  QKV_INLINE Number raise_max(Number block_max) {
    const Number old_max = max;
    max = Math::maximum(block_max, max);
    const Number correction = Math::exp(old_max - shift());
    sum = sum * correction;
    return correction;
  }

  /// Up to here a maximum may stay as it is: weights are at most exp(slack) then, which costs
  /// nothing, and raising it would cost a pass over the output.
  QKV_INLINE Number limit() const { return max + Math::slack(); }

  /// exp(score - max), added to the sum.
  QKV_INLINE Number weight(Number score, Number shift) {
    const Number w = Math::exp(score - shift);
    sum = sum + w;
    return w;
  }

  /// What to subtract from a score. A row that has kept nothing yet has max = -inf, and
  /// -inf - -inf is NaN where the weight must be 0.
  QKV_INLINE Number shift() const {
    return Math::select(Math::is_minus_infinity(max), Math::zero(), max);
  }

  /// What to multiply the sum of weight · value with: 1 / sum, or 0 for a row without keys.
  QKV_INLINE Number normaliser() const {
    return Math::select(Math::is_zero(sum), Math::zero(), Math::one() / sum);
  }
};

}  // namespace qkv::kernels::QKV_ISA
