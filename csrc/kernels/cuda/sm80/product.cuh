#pragma once

#include "kernels/cuda/sm80/tile.cuh"

// Products of tiles by warps. Of the first kind are those whose sums are pairs (own, other), like
// S = Q Kᵀ: both sides are rows of tiles in shared memory, along whose columns they are summed.
// Those of the second kind multiply such pairs with the rows of the others, like P V: pairs are
// rounded where they are, in one part, or in two, of which the second is what rounding took from
// the first. (Tensor cores cut off what float32 has no room for, so that errors of sums do not
// average out: long ones are taken in groups.)

namespace qkv::kernels::sm80 {

/// Sums of a warp's products, kTiles · 16 rows of them: number i of 16 x 8.
template <int kTiles, int kColumns>
using Sums = float[kTiles][kColumns / 8][4];

template <int kTiles>
using Pairs = Sums<kTiles, kOthers>;

/// sums += step k of a product of the first kind. left(t, k, a): its left side, of the warp's tile
/// t.
template <class Element, int kTiles, class Left>
QKV_DEVICE void multiply_step(const Left& left, const Element* others, int step, int k,
                              Pairs<kTiles>& sums) {
  uint32_t a[kTiles][4];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) left(t, k, a[t]);
#pragma unroll
  for (int n = 0; n < kTilesOfOthers; n += 2) {
    uint32_t b[4];
    load_right_of_rows(others + n * 8 * step + k * kStepOfProduct, step, b);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      device::multiply_add(a[t], b[0], b[1], sums[t][n], others);
      device::multiply_add(a[t], b[2], b[3], sums[t][n + 1], others);
    }
  }
}

/// The right sides of kCount products of the second kind, 8 columns of 16 others each: of product c
/// word 2 · (c % 2) of c / 2 is of the first 8 others, the next word of the last 8.
template <int kCount>
using RightSides = uint32_t[kCount / 2][4];

/// Pairs as left sides of products of the second kind, in kParts numbers of the others' type.
template <class OthersElement, int kParts, int kPairTiles>
class HalfPairs {
 public:
  using Element = OthersElement;
  static constexpr int kTiles = kPairTiles;
  /// Products that take turns, as two with the same sums wait for each other.
  static constexpr int kAtOnce = kParts == 1 ? 2 : 4;

  explicit QKV_DEVICE HalfPairs(const Pairs<kTiles>& pairs) {
    const Element* type = nullptr;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kTilesOfOthers; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float first = pairs[t][n][2 * half], second = pairs[t][n][2 * half + 1];
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const uint32_t word = device::rounded_pair(first, second, type);
            words_[part][t][n / 2][n % 2 * 2 + half] = word;
            first -= number_of_word<Element>(word, 0);
            second -= number_of_word<Element>(word, 1);
          }
        }
      }
    }
  }

  /// Number i of product n, as it is multiplied.
  QKV_DEVICE float number(int t, int n, int i) const {
    float x = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      x += number_of_word<Element>(words_[part][t][n / 2][n % 2 * 2 + i / 2], i % 2);
    }
    return x;
  }

  /// Those with 16 others.
  class Step {
   public:
    QKV_DEVICE Step(const HalfPairs& pairs, int k) : pairs_(pairs), k_(k) {}

    /// sums of kAtOnce products += those of tile t.
    QKV_DEVICE void add(int t, const RightSides<kAtOnce>& b, float (*sums)[4]) const {
      const Element* type = nullptr;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          const auto& columns = b[c / 2];
          device::multiply_add(pairs_.words_[part][t][k_], columns[c % 2 * 2],
                               columns[c % 2 * 2 + 1], sums[c], type);
        }
      }
    }

   private:
    const HalfPairs& pairs_;
    int k_;
  };
  QKV_DEVICE Step step(int k) const { return {*this, k}; }

 private:
  uint32_t words_[kParts][kTiles][kOthers / kStepOfProduct][4];
};

/// The same in two numbers of tf32, beside others of float16, which are numbers of tf32 as well:
/// that has float32's range, which pairs may need. Refers to the pairs.
template <int kPairTiles>
class Tf32Pairs {
 public:
  using Element = Float16;
  static constexpr int kTiles = kPairTiles;
  static constexpr int kAtOnce = 4;

  explicit QKV_DEVICE Tf32Pairs(const Pairs<kTiles>& pairs) : pairs_(pairs) {}

  QKV_DEVICE float number(int t, int n, int i) const { return pairs_[t][n][i]; }

  class Step {
   public:
    QKV_DEVICE Step(const Pairs<kTiles>& pairs, int k) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          // A product has 8 others, in any order: column c of the left side is other 2 · c for
          // c < 4, else 2 · (c - 4) + 1, as a lane has its pairs, and a word its halves.
          const int n = i / 4, at = i % 4 / 2 + i % 2 * 2;
          float rest = pairs[t][2 * k + n][i % 4];
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            parts_[part][t][n][at] = device::rounded_to_tf32(rest);
            rest -= parts_[part][t][n][at];
          }
        }
      }
    }

    QKV_DEVICE void add(int t, const RightSides<kAtOnce>& b, float (*sums)[4]) const {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
          for (int c = 0; c < kAtOnce; ++c) {
            const uint32_t others = b[c / 2][c % 2 * 2 + n];
            device::multiply_add(parts_[part][t][n], number_of_word<Element>(others, 0),
                                 number_of_word<Element>(others, 1), sums[c]);
          }
        }
      }
    }

   private:
    float parts_[2][kTiles][2][4];
  };
  QKV_DEVICE Step step(int k) const { return {pairs_, k}; }

 private:
  const Pairs<kTiles>& pairs_;
};

/// sums += pairs · others, the first kWidth columns of their rows.
template <int kWidth, class Left>
QKV_DEVICE void multiply_pairs(const Left& pairs, const typename Left::Element* others, int step,
                               Sums<Left::kTiles, kWidth>& sums) {
  static_assert(kWidth / 8 % Left::kAtOnce == 0 && Left::kAtOnce % 2 == 0);
#pragma unroll
  for (int k = 0; k < kOthers / kStepOfProduct; ++k) {
    const auto left = pairs.step(k);
#pragma unroll
    for (int c = 0; c < kWidth / 8; c += Left::kAtOnce) {
      RightSides<Left::kAtOnce> b;
#pragma unroll
      for (int i = 0; i < Left::kAtOnce / 2; ++i) {
        load_right_of_columns(others + k * kStepOfProduct * step + (c + 2 * i) * 8, step, b[i]);
      }
#pragma unroll
      for (int t = 0; t < Left::kTiles; ++t) left.add(t, b, &sums[t][c]);
    }
  }
}

/// f(words, at) for each 16 bytes of the others that this thread looks after.
template <int kWidth, class Element, class F>
QKV_DEVICE void for_own_pieces(Element* others, int step, const F& f) {
  constexpr int kPiece = 8, kPieces = kWidth / kPiece;
  for (int i = device::thread(); i < kOthers * kPieces; i += kThreadsOfBlock) {
    auto* at = reinterpret_cast<uint32_t*>(others + i / kPieces * step + i % kPieces * kPiece);
    uint32_t words[kPiece / 2];
    device::load_shared(at, words);
    f(words, at);
  }
}

/// What multiply_pairs adds for numbers that are infinite or NaN: to the sums of pairs that are
/// kept, and to no other. kept: a bit for each, see bit_of_number.
template <int kWidth, class Left>
QKV_DEVICE void add_non_finite(const Left& pairs, const uint32_t (&kept)[Left::kTiles],
                               const typename Left::Element* others, int step,
                               Sums<Left::kTiles, kWidth>& sums) {
  using Element = typename Left::Element;
  constexpr int kNumbers = kTilesOfOthers * 4, kSums = kWidth / 8 * 4;
#pragma unroll
  for (int t = 0; t < Left::kTiles; ++t) {
    // Not in registers, as loops that are not unrolled index them.
    float numbers[kNumbers], added[kSums];
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i] = pairs.number(t, i / 4, i % 4);
#pragma unroll 1
    for (int i = 0; i < kSums; ++i) added[i] = 0.0f;
#pragma unroll 1
    for (int other = 0; other < kOthers; ++other) {
      const int holder = lane() / 4 * 4 + other % 8 / 2, n = other / 8;
      const uint32_t kept_of_holder = device::shuffle(kept[t], holder);
#pragma unroll 1
      for (int i = other % 2; i < 4; i += 2) {
        const float pair = device::shuffle(numbers[n * 4 + i], holder);
        if (!(kept_of_holder >> bit_of_number(n, i) & 1)) continue;
#pragma unroll 1
        for (int j = 0; j < kSums / 2; ++j) {
          const int column = j / 2 * 8 + column_of_number(j % 2);
          const uint32_t word = device::load_shared(
              reinterpret_cast<const uint32_t*>(others + other * step + column / 2 * 2));
          if (half_is_finite<Element>(word, j % 2)) continue;
          added[j / 2 * 4 + i / 2 * 2 + j % 2] += pair * number_of_word<Element>(word, j % 2);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[t][i / 4][i % 4] += added[i];
  }
}

/// As multiply_pairs for others of which some may be infinite or NaN, and pairs of which some are
/// not kept, and 0: those must not meet. Numbers that are not finite are added one by one and 0 in
/// shared memory afterwards, so that the bits of all other sums are the same. All threads of a
/// block, with barriers.
template <int kWidth, class Left>
QKV_DEVICE void multiply_kept_pairs(const Left& pairs, const uint32_t (&kept)[Left::kTiles],
                                    typename Left::Element* others, int step,
                                    Sums<Left::kTiles, kWidth>& sums) {
  using Element = typename Left::Element;
  bool finite = true;
  for_own_pieces<kWidth>(others, step, [&](const uint32_t(&words)[4], uint32_t*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      finite =
          finite && half_is_finite<Element>(words[i], 0) && half_is_finite<Element>(words[i], 1);
    }
  });
  if (device::barrier_or(!finite)) {
    add_non_finite<kWidth>(pairs, kept, others, step, sums);
    device::barrier();
    for_own_pieces<kWidth>(others, step, [](uint32_t(&words)[4], uint32_t* at) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] &= half_is_finite<Element>(words[i], 0) ? 0xffffffff : 0xffff0000;
        words[i] &= half_is_finite<Element>(words[i], 1) ? 0xffffffff : 0x0000ffff;
      }
      device::store_shared(at, words);
    });
    device::barrier();
  }
  multiply_pairs<kWidth>(pairs, others, step, sums);
}

}  // namespace qkv::kernels::sm80
