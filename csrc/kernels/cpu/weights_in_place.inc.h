#pragma once

#include "kernels/cpu/math.inc.h"

namespace qkv::kernels::QKV_ISA {

/// For products of a forward tile that keep weights[key][row] in the numbers of their scores, where
/// those were.
template <class Products, class T, int kRows>
class WeightsInPlace {
 public:
  using Number = typename Simd<T>::Number;

  /// to[k][row] = weights of the scores; weigh(k, v, x) makes x, scores of keys from k on, weights.
  template <int kVectors, class Weigh>
  QKV_INLINE void weights(int64_t first_key, int keys, int first_row, T* to, Weigh weigh) const {
    static_cast<const Products*>(this)->template scores<kVectors>(
        first_key, keys, first_row, [&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
          weigh(k, v, x);
          T* line = to + k * kRows + v * Simd<T>::kWidth;
#pragma GCC unroll 4
          for (const auto& weight : x) {
            Simd<T>::store(line, weight);
            line += kRows;
          }
        });
  }

  /// The same of scores that are there already.
  template <int kVectors, class Weigh>
  QKV_INLINE void weights_of_scores(int64_t, int keys, int, T* scores, Weigh weigh) const {
    int k = 0;
    for (; k + kKeys <= keys; k += kKeys) weigh_stored<kKeys, kVectors>(k, scores, weigh);
    for (; k < keys; ++k) weigh_stored<1, kVectors>(k, scores, weigh);
  }

 private:
  static constexpr int kKeys = 4;  // that are worked on together

  template <int kCount, int kVectors, class Weigh>
  static QKV_INLINE void weigh_stored(int64_t first, T* scores, Weigh weigh) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      T* from = scores + first * kRows + v * Simd<T>::kWidth;
      Number x[kCount];
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) x[i] = Simd<T>::load(from + i * kRows);
      weigh(first, v, x);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) Simd<T>::store(from + i * kRows, x[i]);
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
