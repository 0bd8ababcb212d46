#pragma once

#include "kernels/cuda/simt/tile.cuh"
#include "kernels/philox.h"

// What happens to one score between the product and the softmax, in this order:
//
//     softcap      x -> c · tanh(x / c)
//     mask         x -> x + mask_float
//     ALiBi        x -> x - slope · |p - j|       (Press, Smith, Lewis: arXiv:2108.12409)
//
// and whether its pair is kept: by band, bool mask, float mask (-inf drops a pair) and key mask.

namespace qkv::kernels::simt {

/// Counters of philox, one at a time.
struct Words {
  using Vector = uint32_t;
  static QKV_INLINE uint32_t set(uint32_t x) { return x; }
  static QKV_INLINE uint32_t exclusive_or(uint32_t a, uint32_t b, uint32_t c) { return a ^ b ^ c; }
  static QKV_INLINE void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
};

/// A number of an additive mask.
template <class T>
QKV_DEVICE T mask_number(MaskType type, const void* mask, int64_t at) {
  switch (type) {
    case MaskType::kFloat64:
      return static_cast<T>(device::load_global(static_cast<const double*>(mask) + at));
    case MaskType::kBFloat16:
      return static_cast<float>(device::load_global(static_cast<const BFloat16*>(mask) + at));
    case MaskType::kFloat16:
      return static_cast<float>(device::load_global(static_cast<const Float16*>(mask) + at));
    default:
      return static_cast<T>(device::load_global(static_cast<const float*>(mask) + at));
  }
}

/// Something other than the band decides which pairs are kept.
template <class T>
QKV_DEVICE bool has_masks(const Problem<T>& p) {
  return p.attn_mask.type != MaskType::kNone || p.key_mask.data != nullptr;
}

/// Scores are not merely products.
template <class T>
QKV_DEVICE bool changes_scores(const Problem<T>& p) {
  return p.softcap != T(0) || p.alibi_slopes.data != nullptr || has_masks(p);
}

template <class T>
QKV_DEVICE bool drops_weights(const Problem<T>& p) {
  return p.dropout.threshold != 0;
}

/// Scores of one batch element.
template <class T>
class Scores {
 public:
  QKV_DEVICE Scores(const Problem<T>& problem, int64_t batch)
      : p_(problem),
        mask_(batch_offset(problem, batch, problem.attn_mask.batch_stride)),
        key_mask_(problem.key_mask.data +
                  batch_offset(problem, batch, problem.key_mask.batch_stride)),
        slopes_(problem.alibi_slopes.data +
                batch_offset(problem, batch, problem.alibi_slopes.batch_stride)),
        seed_(problem.dropout.threshold == 0
                  ? 0
                  : static_cast<uint64_t>(device::load_global(
                        problem.dropout.seed +
                        batch_offset(problem, batch, problem.dropout.batch_stride)))) {}

  QKV_DEVICE bool masks() const { return has_masks(p_); }
  QKV_DEVICE bool changes() const { return changes_scores(p_); }
  QKV_DEVICE bool drops() const { return drops_weights(p_); }

  /// The score of (row r of the tile, key), which is less than N, from scale · <q, k>, and in cap
  /// the softcap's tanh, or 0 without one: its derivative is 1 - cap². False, and neither, if the
  /// pair is not kept.
  QKV_DEVICE bool modify(const RowTile& rows, int r, int64_t key, T& score, T& cap) const {
    cap = T(0);
    if (!in_band(rows, r, key)) return false;
    if (has_key_mask() && !keeps_key(key)) return false;
    if (p_.softcap != T(0)) {
      cap = hyperbolic_tangent(score / p_.softcap);
      score = p_.softcap * cap;
    }
    if (has_mask() && !add_mask(rows, r, key, score)) return false;
    if (has_slopes()) score -= slope(rows, r) * distance(rows, r, key);
    return true;
  }

  // The steps of modify(), one by one.

  QKV_DEVICE bool in_band(const RowTile& rows, int r, int64_t key) const {
    return key >= device::load_shared(rows.begin + r) && key < device::load_shared(rows.end + r);
  }

  QKV_DEVICE bool has_key_mask() const { return p_.key_mask.data != nullptr; }
  QKV_DEVICE bool keeps_key(int64_t key) const {
    return device::load_global(key_mask_ + key * p_.key_mask.column_stride) != 0;
  }

  QKV_DEVICE T softcap() const { return p_.softcap; }

  QKV_DEVICE bool has_mask() const { return p_.attn_mask.type != MaskType::kNone; }
  /// False if the mask drops the pair.
  QKV_DEVICE bool add_mask(const RowTile& rows, int r, int64_t key, T& score) const {
    const int64_t at = mask_ + device::load_shared(rows.head + r) * p_.attn_mask.head_stride +
                       device::load_shared(rows.query + r) * p_.attn_mask.row_stride +
                       key * p_.attn_mask.column_stride;
    if (p_.attn_mask.type == MaskType::kBool) {
      return device::load_global(static_cast<const uint8_t*>(p_.attn_mask.data) + at) != 0;
    }
    const T bias = mask_number<T>(p_.attn_mask.type, p_.attn_mask.data, at);
    if (bias == -infinity<T>()) return false;
    score += bias;
    return true;
  }

  QKV_DEVICE bool has_slopes() const { return p_.alibi_slopes.data != nullptr; }
  QKV_DEVICE T slope(const RowTile& rows, int r) const {
    const int64_t head = device::load_shared(rows.head + r);
    return device::load_global(slopes_ + head * p_.alibi_slopes.head_stride);
  }

  /// |p - j|
  QKV_DEVICE T distance(const RowTile& rows, int r, int64_t key) const {
    const int64_t ahead = device::load_shared(rows.query + r) + p_.band.offset - key;
    return static_cast<T>(ahead < 0 ? -ahead : ahead);
  }

  /// Of the keys 8 · eighth .. + 7, 16 bits each; a weight stays if its bits reach the threshold.
  QKV_DEVICE void random_words(const RowTile& rows, int r, int64_t eighth,
                               uint32_t (&words)[4]) const {
    words[0] = static_cast<uint32_t>(eighth);
    words[1] = static_cast<uint32_t>(device::load_shared(rows.query + r));
    words[2] = static_cast<uint32_t>(p_.dropout.first_head + device::load_shared(rows.head + r));
    words[3] = 0;
    philox<Words>(words, seed_);
  }
  QKV_DEVICE uint32_t threshold() const { return p_.dropout.threshold; }

  /// Bit b: the weight of key first + b stays, for 4 keys from a multiple of 4 on.
  QKV_DEVICE uint32_t stays(const RowTile& rows, int r, int64_t first) const {
    uint32_t words[4];
    random_words(rows, r, first / 8, words);
    const bool second = first % 8 != 0;
    const uint32_t low = second ? words[2] : words[0], high = second ? words[3] : words[1];
    const uint32_t threshold = p_.dropout.threshold;
    return static_cast<uint32_t>((low & 0xffff) >= threshold) |
           static_cast<uint32_t>((low >> 16) >= threshold) << 1 |
           static_cast<uint32_t>((high & 0xffff) >= threshold) << 2 |
           static_cast<uint32_t>((high >> 16) >= threshold) << 3;
  }

 private:
  const Problem<T>& p_;
  int64_t mask_;  // offset of the batch element in attn_mask
  const uint8_t* key_mask_;
  const T* slopes_;
  uint64_t seed_;
};

/// Which of a thread's pairs are kept, and which of their weights stay: bit 4 · own + other.
struct PairBits {
  uint32_t kept;
  uint32_t stays;
};

/// f(row, key, pair) for each of a thread's pairs of kOwn and 4: rows and keys first_row + row and
/// first_key + key of the tile, pair its number in an array of them. Nothing is unrolled: it would
/// be most of a kernel's code.
template <int kOwn, bool kOwnsKeys, class F>
QKV_DEVICE void for_each_pair(F f) {
  constexpr int kRows = kOwnsKeys ? 4 : kOwn, kKeys = kOwnsKeys ? kOwn : 4;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) f(row, key, kOwnsKeys ? 4 * key + row : 4 * row + key);
  }
}

}  // namespace qkv::kernels::simt
