#pragma once

#include "kernels/cpu/forward_tile.inc.h"
#include "kernels/cpu/isa.h"

// The weights of one tile of query rows, for those who ask for them, and lse:
//
//     weights = exp(S - max) / sum          0 where a pair is not kept
//
// Scores come about as in forward_tile.inc.h. Those of all keys stay until their maximum and sum
// are known, in memory of [keys][rows], as many numbers as the tile has weights; then each is
// written once. Or only <grad, weights> of each row is, for a backward that computes them again and
// does not make that itself (weights_backward.inc.h).

namespace qkv::kernels::QKV_ISA {

/// The keys that some row of a tile sees, from one on with which groups of eight begin.
template <class T, int kRows>
inline KeyRange keys_with_weights(const Problem<T>& p, const RowTile<kRows>& tile) {
  const KeyRange seen = keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys);
  return seen.empty() ? KeyRange{0, 0} : KeyRange{first_of_eight(seen.begin), seen.end};
}

/// f(first key, keys) for blocks of `seen`.
template <class F>
QKV_INLINE void for_each_block_of(KeyRange seen, int most_keys, F f) {
  for (int64_t n = seen.begin; n < seen.end; n += most_keys) {
    f(n, seen.end - n < most_keys ? static_cast<int>(seen.end - n) : most_keys);
  }
}

/// The weights of the keys that nobody sees.
template <class Stored>
inline void set_unseen_to_zero(Stored* row, KeyRange seen, int64_t keys) {
  for (int64_t k = 0; k < seen.begin; ++k) row[k] = Stored{};
  for (int64_t k = seen.end; k < keys; ++k) row[k] = Stored{};
}

/// What is left of rows whose scores have been weighed: a sink's share, and lse.
template <class T, int kRows>
struct WeighedRows {
  using S = Simd<T>;
  alignas(64) T max[kRows], sum[kRows], normaliser[kRows];
  bool has_keys[kRows];

  WeighedRows(const Problem<T>& p, const RowTile<kRows>& tile,
              const OnlineSoftmax<VectorMath<T>>* softmax) {
    for (int v = 0; v < kRows / S::kWidth; ++v) {
      S::store(max + v * S::kWidth, softmax[v].max);
      S::store(sum + v * S::kWidth, softmax[v].sum);
      S::store(normaliser + v * S::kWidth, softmax[v].normaliser());
    }
    for (int r = 0; r < tile.rows; ++r) has_keys[r] = sum[r] != T(0);
    for (int r = 0; p.sinks.data != nullptr && r < tile.rows; ++r) {
      normaliser[r] = add_sink(tile.number_of_head(p.sinks, r), max[r], sum[r]);
    }
  }

  /// Then all of the row's weights are NaN, also of pairs that are not kept.
  bool is_nan(int r) const { return normaliser[r] != normaliser[r]; }
};

template <class Products>
class WeightsTile {
 public:
  using T = typename Products::Real;
  static constexpr int kRows = Products::kRows;
  using Tile = RowTile<kRows>;

  static int64_t bytes(const Problem<T>& p) {
    const int64_t numbers = (p.keys + 2 * kForwardBlockKeys) * kRows;
    return numbers * static_cast<int64_t>(sizeof(T)) + kBitBytes +
           whole_lines(Products::own_bytes(p)) + Products::block_bytes(p);
  }

  WeightsTile(const WeightsParams<T>& params, const Tile& tile, const typename Products::Turn& none,
              void* memory)
      : params_(params),
        p_(params.forward.problem),
        tile_(tile),
        seen_(keys_with_weights(p_, tile)),
        scores_(static_cast<T*>(memory)),
        mask_{reinterpret_cast<uint8_t*>(scores_ + (p_.keys + 2 * kForwardBlockKeys) * kRows),
              scores_ + (p_.keys + kForwardBlockKeys) * kRows},
        products_(params.forward, tile, none, mask_.bits + kBitBytes,
                  mask_.bits + kBitBytes + whole_lines(Products::own_bytes(p_))) {
    alibi_.load(p_, tile);
    vectors_ = (tile.rows + S::kWidth - 1) / S::kWidth;
    for (auto& s : softmax_) s.clear();
  }

  void run() {
    for_each_block([&](int64_t n, int keys) { add_block(n, keys); });
    for (int v = 0; v < vectors_; ++v) weigh(v);
    write_results();
  }

 private:
  using S = Simd<T>;
  using Math = VectorMath<T>;
  using Number = typename S::Number;
  static constexpr int64_t kBitBytes = kForwardBlockKeys / 8 * kRows;

  template <class F>
  QKV_INLINE void for_each_block(F f) const {
    for_each_block_of(seen_, kForwardBlockKeys, f);
  }

  T* scores_of(int64_t key) const { return scores_ + (key - seen_.begin) * kRows; }

  /// Scores and their maxima.
  void add_block(int64_t first_key, int keys) {
    const TileState state = mask_.load(p_, tile_, first_key, keys);
    switch (vectors_) {
      case 1:
        return add_keys<1>(first_key, keys, state);
      case 2:
        return add_keys<2>(first_key, keys, state);
      case 3:
        return add_keys<3>(first_key, keys, state);
      default:
        if constexpr (Products::kVectors == 4) add_keys<4>(first_key, keys, state);
    }
  }

  template <int kVectors>
  void add_keys(int64_t first_key, int keys, TileState state) {
    T* scores = scores_of(first_key);
    if (state == TileState::kEmpty) {
      for (int x = 0; x < keys * kRows; x += S::kWidth)
        S::store(scores + x, Math::minus_infinity());
      return;
    }
    Number block_max[kVectors];
    for (auto& max : block_max) max = Math::minus_infinity();
    products_.template scores<kVectors>(
        first_key, keys, 0, [&](int64_t k, int v, auto& x) __attribute__((always_inline)) {
          T* line = scores + k * kRows + v * S::kWidth;
#pragma GCC unroll 4
          for (auto& score : x) {
            if constexpr (!Products::kScales) score = rounded_product(score, S::set(p_.scale));
            S::store(line, score);
            line += kRows;
            block_max[v] = S::maximum(block_max[v], score);
          }
        });
    const ScoreRows<T, kVectors, kRows> rows(p_, mask_, alibi_, first_key, 0, 0, state);
    if (rows.changes()) rows.change(keys, scores, block_max);
    for (int v = 0; v < kVectors; ++v) {
      softmax_[v].max = Math::maximum(block_max[v], softmax_[v].max);
    }
  }

  /// exp(S - max) where S was, of one vector of rows, and their sums: of each block's before they
  /// are added up.
  void weigh(int v) {
    const ExactWeigher<T> weigher(softmax_[v].shift(), T(1));
    for_each_block([&](int64_t n, int keys) {
      T* line = scores_of(n) + v * S::kWidth;
      Number sum = S::zero();
      const auto replace = [&](auto count) __attribute__((always_inline)) {
        Number x[count()];
        const T* from = line;
        for (auto& score : x) {
          score = S::load(from);
          from += kRows;
        }
        weigher.replace(x);
        for (const auto& weight : x) {
          sum = sum + weight;
          S::store(line, weight);
          line += kRows;
        }
      };
      int k = 0;
      for (; k + 4 <= keys; k += 4) replace(Constant<4>{});
      for (; k < keys; ++k) replace(Constant<1>{});
      softmax_[v].sum = softmax_[v].sum + sum;
    });
  }

  void write_results() {
    const WeighedRows<T, kRows> rows(p_, tile_, softmax_);
    with_stored<T>(p_.key_value_storage, [&](auto stored) {
      using Stored = decltype(stored);
      if (params_.grad.data != nullptr) return write_dots<Stored>(rows.normaliser);
      write_logsumexp(params_.forward, tile_, rows.max, rows.sum, rows.has_keys);
      write_weights<Stored>(rows);
    });
  }

  template <class Stored>
  void write_weights(const WeighedRows<T, kRows>& weighed) {
    const auto rows = tile_.template stored_rows_in<Stored>(params_.forward.out);
    for (int first = 0; first < tile_.rows; first += S::kWidth) {
      Stored* to[S::kWidth];
      for (int l = 0; l < S::kWidth; ++l) {
        to[l] = first + l < tile_.rows ? rows[first + l] + seen_.begin : nullptr;
      }
      transpose_columns<T, Stored>(scores_ + first, kRows, seen_.end - seen_.begin,
                                   S::load(weighed.normaliser + first), to);
    }
    bool any_nan = false;
    for (int r = 0; r < tile_.rows; ++r) {
      set_unseen_to_zero(rows[r], seen_, p_.keys);
      any_nan |= weighed.is_nan(r);
    }
    if (any_nan) set_dropped_to_zero<Stored>();
  }

  template <class Stored>
  void set_dropped_to_zero() {
    const auto rows = tile_.template stored_rows_in<Stored>(params_.forward.out);
    for_each_block([&](int64_t n, int keys) {
      const TileState state = mask_.load(p_, tile_, n, keys);
      for (int r = 0; r < tile_.rows; ++r) {
        for (int k = 0; k < keys; ++k) {
          if (!mask_.keeps(state, k, r)) rows[r][n + k] = Stored{};
        }
      }
    });
  }

  /// <grad, weights> of each row; grad may be anything where a pair is not kept.
  template <class Stored>
  void write_dots(const T* normaliser) {
    const auto rows = tile_.template stored_rows_in<Stored>(params_.grad);
    Number total[Products::kVectors];
    for (auto& x : total) x = S::zero();
    for_each_block([&](int64_t n, int keys) {
      const TileState state = mask_.load(p_, tile_, n, keys);
      if (state == TileState::kEmpty) return;
      T* const grads = mask_.bias;  // of one vector of rows; masks are in the scores
      for (int v = 0; v < vectors_; ++v) {
        const Stored* from[S::kWidth];
        for (int l = 0; l < S::kWidth; ++l) {
          const int r = v * S::kWidth + l;
          from[l] = r < tile_.rows ? rows[r] + n : nullptr;
        }
        transpose_rows<T, Stored>(from, keys, T(1), grads, S::kWidth);
        const T* weights = scores_of(n) + v * S::kWidth;
        const uint8_t* bits = mask_.bits + v * S::kWidth;
        auto sum = S::zero();
        for (int k = 0; k < keys; ++k) {
          auto grad = S::load(grads + k * S::kWidth);
          if (state == TileState::kPartial) {
            grad = S::select(S::bit_of_bytes(bits + k / 8 * kRows, k % 8), grad, S::zero());
          }
          sum = S::fma(S::load(weights + k * kRows), grad, sum);
        }
        total[v] = total[v] + sum;
      }
    });
    alignas(64) T dots[kRows];
    for (int v = 0; v < vectors_; ++v) {
      S::store(dots + v * S::kWidth, total[v] * S::load(normaliser + v * S::kWidth));
    }
    for (int r = 0; r < tile_.rows; ++r) params_.dots[tile_.scalar(p_, r)] = dots[r];
  }

  const WeightsParams<T>& params_;
  const Problem<T>& p_;
  const Tile& tile_;
  KeyRange seen_;  // by some row
  T* scores_;      // [keys of seen_][rows], then exp(S - max)
  MaskTile<T, kRows> mask_;
  AlibiTile<T, Products::kVectors> alibi_;
  OnlineSoftmax<Math> softmax_[Products::kVectors];
  Products products_;
  int vectors_;  // that have rows
};

}  // namespace qkv::kernels::QKV_ISA
