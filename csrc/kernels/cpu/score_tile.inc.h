#pragma once

#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"

// What happens to a tile of scores between the product and the softmax, each a pass over
// scores[key][row], or over some vectors of its rows:
//
//     softcap      x -> c · tanh(x / c)
//     mask         x -> x + mask_float
//     ALiBi        x -> x - slope · |p - j|       (Press, Smith, Lewis: arXiv:2108.12409)

namespace qkv::kernels::QKV_ISA {

/// scores = softcap(scores); slopes, unless nullptr, takes the derivative, 1 - tanh².
template <class T, int kVectors, int kRows>
inline void cap_scores(T softcap, int keys, T* scores, T* slopes) {
  using S = Simd<T>;
  const auto cap = S::set(softcap), inverse = S::set(T(1) / softcap), one = S::set(T(1));
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t x = k * kRows + v * S::kWidth;
      const auto t = tanh_of<T>(S::load(scores + x) * inverse);
      S::store(scores + x, cap * t);
      if (slopes != nullptr) S::store(slopes + x, S::fma(S::zero() - t, t, one));
    }
  }
}

template <class T, int kVectors, int kRows>
inline void add_bias(const T* bias, int keys, T* scores) {
  using S = Simd<T>;
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t x = k * kRows + v * S::kWidth;
      S::store(scores + x, S::load(scores + x) + S::load(bias + x));
    }
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

  /// f(k, v, |p - j|) for each of the keys first_key + k and each vector of rows, or kCount of them
  /// from first_vector on.
  template <int kCount = kVectors, class F>
  QKV_INLINE void for_each_distance(int64_t first_key, int keys, F f, int first_vector = 0) const {
    const auto ahead = S::set(static_cast<T>(first_position - first_key));
    for (int v = first_vector; v < first_vector + kCount; ++v) {
      const auto from_first_key = S::load(position + v * S::kWidth) + ahead;
      for (int k = 0; k < keys; ++k) {
        f(k, v, absolute<T>(from_first_key - S::set(static_cast<T>(k))));
      }
    }
  }

  /// For kCount vectors of rows; scores begins with the first of them.
  template <int kCount>
  void add(int64_t first_key, int keys, int first_vector, T* scores) const {
    const auto ahead = S::set(static_cast<T>(first_position - first_key));
    for (int v = 0; v < kCount; ++v) {
      const int first_row = (first_vector + v) * S::kWidth;
      const auto from_first_key = S::load(position + first_row) + ahead;
      const auto minus_slope = S::zero() - S::load(slope + first_row);
      for (int k = 0; k < keys; ++k) {
        const auto distance = absolute<T>(from_first_key - S::set(static_cast<T>(k)));
        T* s = scores + k * kRows + v * S::kWidth;
        S::store(s, S::fma(minus_slope, distance, S::load(s)));
      }
    }
  }
};

/// Rows of a tile of scores: vectors first .. first + kVectors of its kRows rows, keys first_key ..
/// of the mask's block at `offset`. scores begins with the first of them.
template <class T, int kVectors, int kRows>
struct ScoreRows {
  const Problem<T>& p;
  const MaskTile<T, kRows>& mask;
  const AlibiTile<T, kRows / Simd<T>::kWidth>& alibi;
  int64_t first_key;
  int keys;
  int offset;
  int first_vector;
  T* scores;

  /// All that happens to them, in this order. cap_slopes, unless nullptr, takes the derivative of
  /// the softcap.
  void modify(T* cap_slopes = nullptr) const {
    if (p.softcap != T(0)) cap_scores<T, kVectors, kRows>(p.softcap, keys, scores, cap_slopes);
    if (mask.has_bias(p)) {
      add_bias<T, kVectors, kRows>(mask.bias + offset * kRows + first_vector * Simd<T>::kWidth,
                                   keys, scores);
    }
    if (p.alibi_slopes.data != nullptr) {
      alibi.template add<kVectors>(first_key, keys, first_vector, scores);
    }
  }

  /// -inf where the pair is not kept; block_max takes the maxima of what is.
  void keep(TileState state, typename Simd<T>::Number* block_max) const {
    using S = Simd<T>;
    const uint8_t* bits = mask.bits + offset / 8 * kRows + first_vector * S::kWidth;
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
};

/// All rows of a tile.
template <class T, int kVectors>
inline void modify_scores(const Problem<T>& p, const MaskTile<T, kVectors * Simd<T>::kWidth>& mask,
                          const AlibiTile<T, kVectors>& alibi, int64_t first_key, int keys,
                          T* scores, T* cap_slopes = nullptr) {
  const ScoreRows<T, kVectors, kVectors * Simd<T>::kWidth> rows{p,    mask, alibi, first_key,
                                                                keys, 0,    0,     scores};
  rows.modify(cap_slopes);
}

}  // namespace qkv::kernels::QKV_ISA
