#pragma once

#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"

// What happens to a tile of scores between the product and the softmax, each a pass over
// scores[key][row]:
//
//     softcap      x -> c · tanh(x / c)
//     mask         x -> x + mask_float
//     ALiBi        x -> x - slope · |p - j|       (Press, Smith, Lewis: arXiv:2108.12409)

namespace qkv::kernels::QKV_ISA {

/// scores = softcap(scores); slopes, unless nullptr, takes the derivative, 1 - tanh².
template <class T>
inline void cap_scores(T softcap, int64_t size, T* scores, T* slopes) {
  using S = Simd<T>;
  const auto cap = S::set(softcap), inverse = S::set(T(1) / softcap), one = S::set(T(1));
  for (int64_t x = 0; x < size; x += S::kWidth) {
    const auto t = tanh_of<T>(S::load(scores + x) * inverse);
    S::store(scores + x, cap * t);
    if (slopes != nullptr) S::store(slopes + x, S::fma(S::zero() - t, t, one));
  }
}

template <class T>
inline void add_bias(const T* bias, int64_t size, T* scores) {
  using S = Simd<T>;
  for (int64_t x = 0; x < size; x += S::kWidth) {
    S::store(scores + x, S::load(scores + x) + S::load(bias + x));
  }
}

/// How far the rows of a tile are from a key, and what a step costs.
template <class T, int kVectors>
struct AlibiTile {
  using S = Simd<T>;
  using Number = typename S::Number;
  static constexpr int kRows = kVectors * S::kWidth;

  alignas(64) T slope[kRows];
  alignas(64) T position[kRows];  // counted from the tile's first row's
  int64_t first_position;

  void load(const Problem<T>& problem, const RowTile<kRows>& tile) {
    if (problem.alibi_slopes.data == nullptr) return;
    first_position = tile.first_query() + problem.band.offset;
    for (int r = 0; r < kRows; ++r) {
      const bool has_row = r < tile.rows;
      slope[r] = has_row ? tile.number_of_head(problem.alibi_slopes, r) : T(0);
      position[r] = has_row ? static_cast<T>(tile.query[r] - tile.first_query()) : T(0);
    }
  }

  /// f(k, v, |p - j|) for each of the keys first_key + k and each vector of rows.
  template <class F>
  QKV_INLINE void for_each_distance(int64_t first_key, int keys, F f) const {
    const auto ahead = S::set(static_cast<T>(first_position - first_key));
    for (int v = 0; v < kVectors; ++v) {
      const auto from_first_key = S::load(position + v * S::kWidth) + ahead;
      for (int k = 0; k < keys; ++k) {
        f(k, v, absolute<T>(from_first_key - S::set(static_cast<T>(k))));
      }
    }
  }

  void add(int64_t first_key, int keys, T* scores) const {
    for_each_distance(
        first_key, keys, [&](int k, int v, Number distance) __attribute__((always_inline)) {
          T* s = scores + k * kRows + v * S::kWidth;
          S::store(s, S::fma(S::zero() - S::load(slope + v * S::kWidth), distance, S::load(s)));
        });
  }
};

/// All of it, in this order. cap_slopes, unless nullptr, takes the derivative of the softcap.
template <class T, int kVectors>
inline void modify_scores(const Problem<T>& p, const MaskTile<T, kVectors * Simd<T>::kWidth>& mask,
                          const AlibiTile<T, kVectors>& alibi, int64_t first_key, int keys,
                          T* scores, T* cap_slopes = nullptr) {
  const int64_t size = static_cast<int64_t>(keys) * kVectors * Simd<T>::kWidth;
  if (p.softcap != T(0)) cap_scores<T>(p.softcap, size, scores, cap_slopes);
  if (mask.has_bias(p)) add_bias<T>(mask.bias, size, scores);
  if (p.alibi_slopes.data != nullptr) alibi.add(first_key, keys, scores);
}

/// -inf where the pair is not kept; block_max takes the maxima of what is.
template <class T, int kVectors>
inline void keep_scores(const uint8_t* bits, TileState state, int keys, T* scores,
                        typename Simd<T>::Number* block_max) {
  using S = Simd<T>;
  constexpr int kRows = kVectors * S::kWidth;
  const auto dropped = S::set(-static_cast<T>(__builtin_inff()));
  for (int v = 0; v < kVectors; ++v) block_max[v] = dropped;
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      T* s = scores + k * kRows + v * S::kWidth;
      auto x = S::load(s);
      if (state == TileState::kPartial) {
        x = S::select(S::bit_of_bytes(bits + k / 8 * kRows + v * S::kWidth, k % 8), x, dropped);
        S::store(s, x);
      }
      block_max[v] = S::maximum(block_max[v], x);
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
