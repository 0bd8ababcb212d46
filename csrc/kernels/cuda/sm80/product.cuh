#pragma once

#include "kernels/cuda/sm80/tile.cuh"

// Products of tiles by warps. Of the first kind are those whose sums are pairs (own, other), like
// S = Q Kᵀ: both sides are rows of tiles in shared memory, along whose columns they are summed.
// Those of the second kind multiply such pairs with the rows of the others, like P V: pairs are
// rounded to 16 bits where they are, in one part, or in two, of which the second is what rounding
// took from the first.

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

/// Pairs as the left sides of products of the second kind, 16 others at a time.
template <int kParts, int kTiles>
using RoundedPairs = uint32_t[kParts][kTiles][kOthers / kStepOfProduct][4];

template <class Element, int kParts, int kTiles>
QKV_DEVICE void round_pairs(const Pairs<kTiles>& pairs, RoundedPairs<kParts, kTiles>& rounded) {
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
          rounded[part][t][n / 2][n % 2 * 2 + half] = word;
          first -= number_of_word<Element>(word, 0);
          second -= number_of_word<Element>(word, 1);
        }
      }
    }
  }
}

/// sums += pairs · others, the first kWidth columns of their rows.
template <class Element, int kParts, int kTiles, int kWidth>
QKV_DEVICE void multiply_pairs(const RoundedPairs<kParts, kTiles>& pairs, const Element* others,
                               int step, Sums<kTiles, kWidth>& sums) {
#pragma unroll
  for (int k = 0; k < kOthers / kStepOfProduct; ++k) {
#pragma unroll
    for (int c = 0; c < kWidth / 8; c += 2) {
      uint32_t b[4];
      load_right_of_columns(others + k * kStepOfProduct * step + c * 8, step, b);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          device::multiply_add(pairs[part][t][k], b[0], b[1], sums[t][c], others);
          device::multiply_add(pairs[part][t][k], b[2], b[3], sums[t][c + 1], others);
        }
      }
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
/// kept, and to no other. kept: bits as pair_line.cuh has them.
template <class Element, int kParts, int kTiles, int kWidth>
QKV_DEVICE void add_non_finite(const RoundedPairs<kParts, kTiles>& pairs,
                               const uint32_t (&kept)[kTiles], const Element* others, int step,
                               Sums<kTiles, kWidth>& sums) {
  constexpr int kWords = kTilesOfOthers * 2, kSums = kWidth / 8 * 4;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    // Not in registers, as loops that are not unrolled index them.
    uint32_t words[kParts][kWords];
    float added[kSums];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[part][i] = pairs[part][t][i / 4][i % 4];
    }
#pragma unroll 1
    for (int i = 0; i < kSums; ++i) added[i] = 0.0f;
#pragma unroll 1
    for (int other = 0; other < kOthers; ++other) {
      const int holder = lane() / 4 * 4 + other % 8 / 2, n = other / 8;
      const uint32_t kept_of_holder = device::shuffle(kept[t], holder);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        float pair = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint32_t word = device::shuffle(words[part][n * 2 + half], holder);
          pair += number_of_word<Element>(word, other % 2);
        }
        if (!(kept_of_holder >> (half * 16 + n * 2 + other % 2) & 1)) continue;
#pragma unroll 1
        for (int i = 0; i < kSums / 2; ++i) {
          const int column = i / 2 * 8 + column_of_number(i % 2);
          const uint32_t word = device::load_shared(
              reinterpret_cast<const uint32_t*>(others + other * step + column / 2 * 2));
          if (half_is_finite<Element>(word, i % 2)) continue;
          added[i / 2 * 4 + half * 2 + i % 2] += pair * number_of_word<Element>(word, i % 2);
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
template <class Element, int kParts, int kTiles, int kWidth>
QKV_DEVICE void multiply_kept_pairs(const RoundedPairs<kParts, kTiles>& pairs,
                                    const uint32_t (&kept)[kTiles], Element* others, int step,
                                    Sums<kTiles, kWidth>& sums) {
  bool finite = true;
  for_own_pieces<kWidth>(others, step, [&](const uint32_t(&words)[4], uint32_t*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      finite =
          finite && half_is_finite<Element>(words[i], 0) && half_is_finite<Element>(words[i], 1);
    }
  });
  if (device::barrier_or(!finite)) {
    add_non_finite<Element, kParts, kTiles, kWidth>(pairs, kept, others, step, sums);
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
  multiply_pairs<Element, kParts, kTiles, kWidth>(pairs, others, step, sums);
}

}  // namespace qkv::kernels::sm80
