#pragma once

#include "kernels/cpu/math.inc.h"

namespace qkv::kernels::QKV_ISA {

/// For a source of a forward tile that keeps weights[key][row] in the numbers of their scores,
/// where those were.
template <class Source, class T, int kRows>
class WeightsInPlace {
 public:
  using Number = typename Simd<T>::Number;

  /// to[k][row] = weight(k, v, the score).
  template <int kVectors, class Weight>
  QKV_INLINE void weights(int64_t first_key, int keys, int first_row, T* to, Weight weight) const {
    static_cast<const Source*>(this)->template scores<kVectors>(
        first_key, keys, first_row, [&](int64_t k, int v, Number x) __attribute__((always_inline)) {
          Simd<T>::store(to + k * kRows + v * Simd<T>::kWidth, weight(k, v, x));
        });
  }

  /// The same of scores that are there already.
  template <int kVectors, class Weight>
  QKV_INLINE void weights_of_scores(int64_t, int keys, int, T* scores, Weight weight) const {
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        T* x = scores + k * kRows + v * Simd<T>::kWidth;
        Simd<T>::store(x, weight(k, v, Simd<T>::load(x)));
      }
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
