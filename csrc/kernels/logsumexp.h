#pragma once

// What becomes of the maximum of a row's scores and the sum of exp(score - maximum) when all keys
// have been seen.
//
// QKV_ISA names the namespace this is compiled into, so that no two instruction sets share code;
// natural_exp is its own, declared before, and so is natural_log where log_of_sum is used.

namespace qkv::kernels::QKV_ISA {

/// lse = max + log(sum), and in rest what rounding takes from it: P = exp((S - lse) - rest) is as
/// precise for scores of any size.
template <class T>
QKV_INLINE void log_of_sum(T max, T sum, T& lse, T& rest) {
  const T log_sum = natural_log(sum);
  lse = max + log_sum;
  rest = lse - lse == T(0) ? (max - lse) + log_sum : T(0);  // 0 if lse is not finite
}

/// The same of the lanes of vectors, whose Math has log(x) beside what OnlineSoftmax asks for.
template <class Math>
QKV_INLINE void log_of_sums(typename Math::Number max, typename Math::Number sum,
                            typename Math::Number& lse, typename Math::Number& rest) {
  const auto log_sum = Math::log(sum);
  lse = max + log_sum;
  rest = Math::select(Math::is_zero(lse - lse), (max - lse) + log_sum, Math::zero());
}

/// The rest of a row without keys, which no other row has: where a sink has all the weight, lse
/// does not tell whether keys have too little to count or there are none.
template <class T>
constexpr T kRestWithoutKeys = -T(0);

template <class T>
QKV_INLINE bool has_no_keys(T lse_rest) {
  return lse_rest == T(0) && T(1) / lse_rest < T(0);
}

/// Takes a sink into the maximum and the sum of a row. Returns what to multiply with what was
/// summed so far to normalise it: 0 for a row without keys, even if its sink is NaN.
template <class T>
QKV_INLINE T add_sink(T sink, T& max, T& sum) {
  const bool has_keys = sum != T(0);
  const T new_max = max > sink ? max : sink;
  if (new_max == -static_cast<T>(__builtin_huge_valf())) return T(0);
  const T correction = natural_exp(max - new_max);
  sum = sum * correction + (sink == new_max ? T(1) : natural_exp(sink - new_max));
  max = new_max;
  return has_keys ? correction / sum : T(0);
}

/// exp(sink - lse), the weight of a row's sink: 1 for a row without keys, even if its sink is NaN;
/// 0 if that is -inf.
template <class T>
QKV_INLINE T sink_weight(T sink, T lse, T lse_rest) {
  if (lse == -static_cast<T>(__builtin_huge_valf())) return T(0);
  if (has_no_keys(lse_rest)) return T(1);
  const T below = sink == lse ? T(0) : (sink - lse) - lse_rest;
  return below >= T(0) ? T(1) : natural_exp(below);
}

/// mean · (1 - W) + W · sink', where the keys have `of_keys` of the weight and the sink has W: the
/// one is the other's difference from 1, so the smaller of them tells both.
template <class T>
QKV_INLINE T mean_with_sink(T mean, T of_keys, T of_sink, T sink_t) {
  constexpr T kNearlyAll = T(0.9375);
  return of_sink < kNearlyAll ? mean + of_sink * (sink_t - mean)
                              : of_keys * mean + of_sink * sink_t;
}

}  // namespace qkv::kernels::QKV_ISA
