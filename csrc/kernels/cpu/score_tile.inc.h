#pragma once

#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"

// What happens to a tile of scores between the product and the softmax:
//
//     softcap      x -> c · tanh(x / c)
//     mask         x -> x + mask_float
//     ALiBi        x -> x - slope · |p - j|       (Press, Smith, Lewis: arXiv:2108.12409)

namespace qkv::kernels::QKV_ISA {

/// scores = softcap(scores); slopes, unless nullptr, takes the derivative.
template <class T, int kVectors, int kRows>
inline void cap_scores(Softcap<T> softcap, int keys, T* scores, T* slopes) {
  using S = Simd<T>;
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t x = k * kRows + v * S::kWidth;
      const auto capped = softcap(S::load(scores + x));
      S::store(scores + x, capped);
      if (slopes != nullptr) S::store(slopes + x, softcap.slope(capped));
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
};

/// Bits of a byte as bytes of 0 or 1.
QKV_INLINE uint64_t bytes_of_bits(uint8_t bits) {
  const uint64_t apart = bits * 0x0101010101010101ull & 0x8040201008040201ull;
  return (apart + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
}

/// kept[key][kFew], zeros before, becomes 1 of pairs whose bits are set (MaskTile).
template <int kFew, int kRows, int kMostBytes>
inline void set_kept_bytes(const uint8_t* bits, int rows, int keys, uint8_t (&kept)[kMostBytes]) {
  for (int k = 0; k < keys && k < kMostBytes / kFew; k += 8, bits += kRows) {
    if constexpr (kFew == 1) {
      const uint64_t bytes = bytes_of_bits(bits[0]);
      __builtin_memcpy(kept + k, &bytes, 8);
    } else {
      for (int r = 0; r < rows; ++r) {
        for (int b = 0; b < 8; ++b) kept[(k + b) * kFew + r] = bits[r] >> b & 1;
      }
    }
  }
}

/// All that happens to scores[key][kFew] of few rows, for which their mask was loaded
/// (MaskTile::load_few_rows), in whole vectors. `between`, [kMostKeys][kFew], takes a float mask in
/// that order; zeros in the place of rows that the tile does not have stay there.
template <int kFew, int kMostKeys, class T, int kRows>
QKV_ONE_COPY void change_scores_of_few_rows(const Problem<T>& p, int rows,
                                            const MaskTile<T, kRows>& mask,
                                            const AlibiTile<T, kRows / Simd<T>::kWidth>& alibi,
                                            int64_t first_key, int keys, TileState state,
                                            T* between, T* scores) {
  using S = Simd<T>;
  static_assert(S::kWidth % kFew == 0);
  const Softcap<T> softcap(p.softcap);
  const bool caps = softcap.cap != T(0), has_alibi = p.alibi_slopes.data != nullptr;
  const T* bias = mask.has_bias(p) ? mask.bias : nullptr;
  if (kFew > 1 && bias != nullptr) {
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < keys; ++k) between[k * kFew + r] = bias[r * kMostKeys + k];
    }
    bias = between;
  }
  const auto dropped = S::set(-static_cast<T>(__builtin_inff()));
  alignas(64) T minus_slope[S::kWidth], position[S::kWidth];
  for (int l = 0; has_alibi && l < S::kWidth; ++l) {
    minus_slope[l] = -alibi.slope[l % kFew];
    position[l] = alibi.position[l % kFew] - static_cast<T>(l / kFew);
  }
  const bool drops = state == TileState::kPartial;
  uint8_t kept[kMostKeys * kFew] = {};
  if (drops) set_kept_bytes<kFew, kRows>(mask.bits, rows, keys, kept);
  for (int x = 0; x < keys * kFew; x += S::kWidth) {
    auto score = S::load(scores + x);
    if (caps) score = softcap(score);
    if (bias != nullptr) score = score + S::load(bias + x);
    if (has_alibi) {
      const auto ahead = S::set(static_cast<T>(alibi.first_position - first_key - x / kFew));
      const auto distance = absolute<T>(ahead + S::load(position));
      score = S::fma(S::load(minus_slope), distance, score);
    }
    if (drops) score = S::select(S::bit_of_bytes(kept + x, 0), score, dropped);
    S::store(scores + x, score);
  }
}

/// Rows of a tile of scores: vectors first_vector .. + kVectors of its kRows rows, keys first_key
/// .., which lie `offset` after the first of those that the mask was loaded for.
template <class T, int kVectors, int kRows>
class ScoreRows {
 public:
  using S = Simd<T>;
  using Number = typename S::Number;
  using Alibi = AlibiTile<T, kRows / S::kWidth>;

  ScoreRows(const Problem<T>& p, const MaskTile<T, kRows>& mask, const Alibi& alibi,
            int64_t first_key, int offset, int first_vector, TileState state)
      : softcap_(p.softcap) {
    const int first_row = first_vector * S::kWidth;
    if (mask.has_bias(p)) bias_ = mask.bias + offset * kRows + first_row;
    if (state == TileState::kPartial) bits_ = mask.bits + offset / 8 * kRows + first_row;
    has_alibi_ = p.alibi_slopes.data != nullptr;
    if (!has_alibi_) return;
    const auto ahead = S::set(static_cast<T>(alibi.first_position - first_key));
    for (int v = 0; v < kVectors; ++v) {
      from_first_key_[v] = S::load(alibi.position + first_row + v * S::kWidth) + ahead;
      minus_slope_[v] = S::zero() - S::load(alibi.slope + first_row + v * S::kWidth);
    }
  }

  bool is_biased() const { return bias_ != nullptr || has_alibi_; }
  bool is_capped() const { return softcap_.cap != T(0); }
  bool changes() const { return is_capped() || is_biased() || bits_ != nullptr; }

  /// One vector with the softcap.
  QKV_INLINE Number capped(Number x) const { return softcap_(x); }

  /// One vector with mask and ALiBi.
  QKV_INLINE Number biased(int64_t k, int v, Number x) const {
    if (bias_ != nullptr) x = x + S::load(bias_ + k * kRows + v * S::kWidth);
    if (has_alibi_) {
      const auto distance = absolute<T>(from_first_key_[v] - S::set(static_cast<T>(k)));
      x = S::fma(minus_slope_[v], distance, x);
    }
    return x;
  }

  /// The same, and -inf where the pair is not kept.
  QKV_INLINE Number biased_and_kept(int64_t k, int v, Number x) const {
    x = biased(k, v, x);
    if (bits_ == nullptr) return x;
    const auto kept = S::bit_of_bytes(bits_ + k / 8 * kRows + v * S::kWidth, k % 8);
    return S::select(kept, x, S::set(-static_cast<T>(__builtin_inff())));
  }

  /// scores[key][row] with the softcap; slopes, unless nullptr, takes the derivative.
  void cap(int keys, T* scores, T* slopes = nullptr) const {
    if (is_capped()) cap_scores<T, kVectors, kRows>(softcap_, keys, scores, slopes);
  }

  /// All that happens to scores[key][row]; max takes the maxima of what is kept.
  void change(int keys, T* scores, Number* max) const {
    cap(keys, scores);
    for (int v = 0; v < kVectors; ++v) max[v] = S::set(-static_cast<T>(__builtin_inff()));
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        T* s = scores + k * kRows + v * S::kWidth;
        const auto score = biased_and_kept(k, v, S::load(s));
        max[v] = S::maximum(max[v], score);
        S::store(s, score);
      }
    }
  }

  /// scores[key][row] with mask and ALiBi.
  void bias(int keys, T* scores) const {
    if (!is_biased()) return;
    for (int k = 0; k < keys; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        T* s = scores + k * kRows + v * S::kWidth;
        S::store(s, biased(k, v, S::load(s)));
      }
    }
  }

 private:
  Softcap<T> softcap_;
  const T* bias_ = nullptr;        // [keys][kRows]
  const uint8_t* bits_ = nullptr;  // as in MaskTile
  bool has_alibi_;
  Number from_first_key_[kVectors];  // with ALiBi: the rows' distance from the first key
  Number minus_slope_[kVectors];
};

}  // namespace qkv::kernels::QKV_ISA
