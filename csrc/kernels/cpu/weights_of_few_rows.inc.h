#pragma once

#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/weights_tile.inc.h"

// The weights of a head's few rows, whose scores come about as in few_rows.inc.h.

namespace qkv::kernels::QKV_ISA {

/// Scores of all keys, and what those of a block need.
template <class T>
inline int64_t weights_of_few_rows_bytes(const Problem<T>& p, int64_t rows) {
  constexpr int kWidth = Simd<T>::kWidth;
  const int64_t query = 2 * (p.head_dim + 2 * kWidth), scores = p.keys + 2 * kFewRowsBlockKeys;
  const int64_t numbers = rows * (query + scores) + kFewRowsBlockKeys * (rows + kWidth);
  return numbers * static_cast<int64_t>(sizeof(T)) + kFewRowsBlockKeys / 8 * kWidth;
}

template <class Products, class T, class Stored, int kRows>
class WeightsOfFewRows {
 public:
  static constexpr int kLanes = Simd<T>::kWidth;
  using Tile = RowTile<kLanes>;

  WeightsOfFewRows(const WeightsParams<T>& params, const Tile& tile, T* scratch)
      : params_(params),
        p_(params.forward.problem),
        tile_(tile),
        seen_(keys_with_weights(p_, tile)),
        scores_(scratch),
        bias_between_(scores_ + (p_.keys + 2 * kFewRowsBlockKeys) * kRows),
        mask_{nullptr, bias_between_ + kFewRowsBlockKeys * kRows},
        query_(reinterpret_cast<Query*>(mask_.bias + kFewRowsBlockKeys * kLanes)) {
    mask_.bits = reinterpret_cast<uint8_t*>(query_ + Products::query_size(kRows, p_.head_dim));
    alibi_.load(p_, tile);
    if (kRows > 1 && mask_.has_bias(p_)) set_to_zero(bias_between_, kFewRowsBlockKeys * kRows);
    const Stored* rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      rows[r] = r < tile.rows ? tile.template stored_row<Stored>(p_.query, r) : nullptr;
    }
    Products::template pack_query<kRows>(rows, p_.head_dim, p_.scale, query_);
  }

  void run() {
    for_each_block([&](int64_t n, int keys, TileState state, T* scores) {
      if (state == TileState::kEmpty) {
        for (int x = 0; x < keys * kRows; ++x) scores[x] = -static_cast<T>(__builtin_inff());
        return;
      }
      const Stored* keys_of_head = tile_.template stored_keys_of_head<Stored>(p_.key);
      Products::template scores<kRows>(keys, p_.head_dim, keys_of_head + n * p_.key.row_stride,
                                       p_.key.row_stride, query_, p_.scale, scores, NextRows{});
      if (ScoreRows<T, 1, kLanes>(p_, mask_, alibi_, n, 0, 0, state).changes()) {
        change_scores_of_few_rows<kRows, kFewRowsBlockKeys>(p_, tile_.rows, mask_, alibi_, n, keys,
                                                            state, bias_between_, scores);
      }
    });
    OnlineSoftmax<Math> softmax;
    softmax.clear();
    const int64_t keys = seen_.end - seen_.begin;
    if (keys > 0) softmax.max = max_of_scores<T, kRows>(keys, scores_);
    softmax.sum = weigh<T, kRows>(keys, scores_, softmax.shift());
    write_results(WeighedRows<T, kLanes>(p_, tile_, &softmax));
  }

 private:
  using S = Simd<T>;
  using Math = VectorMath<T>;
  using Query = typename Products::Query;

  /// f(first key, keys, state of the mask, their scores)
  template <class F>
  void for_each_block(F f) {
    for_each_block_of(seen_, kFewRowsBlockKeys, [&](int64_t n, int keys) {
      f(n, keys, mask_.load_few_rows(p_, tile_, n, keys, kFewRowsBlockKeys),
        scores_ + (n - seen_.begin) * kRows);
    });
  }

  void write_results(const WeighedRows<T, kLanes>& weighed) {
    if (params_.grad.data != nullptr) return write_dots(weighed.normaliser);
    write_logsumexp(params_.forward, tile_, weighed.max, weighed.sum, weighed.has_keys);
    const auto rows = tile_.template stored_rows_in<Stored>(params_.forward.out);
    for (int r = 0; r < tile_.rows; ++r) {
      write_row(r, weighed.normaliser[r], rows[r]);
      if (weighed.is_nan(r)) set_dropped_to_zero(r, rows[r]);
    }
  }

  void write_row(int r, T normaliser, Stored* row) {
    set_unseen_to_zero(row, seen_, p_.keys);
    Stored* to = row + seen_.begin;
    const int64_t keys = seen_.end - seen_.begin;
    for (int64_t k = 0; k < keys; k += kLanes) {
      alignas(64) T line[kLanes];
      for (int l = 0; l < kLanes; ++l) line[l] = scores_[(k + l) * kRows + r];
      const auto weights = S::load(line) * S::set(normaliser);
      keys - k < kLanes ? store_first<T>(to + k, weights, keys - k)
                        : store_rounded<T>(to + k, weights);
    }
  }

  void set_dropped_to_zero(int r, Stored* row) {
    for_each_block([&](int64_t n, int keys, TileState state, T*) {
      for (int k = 0; k < keys; ++k) {
        if (!mask_.keeps(state, k, r)) row[n + k] = Stored{};
      }
    });
  }

  /// <grad, weights> of each row; grad may be anything where a pair is not kept.
  void write_dots(const T* normaliser) {
    const auto rows = tile_.template stored_rows_in<Stored>(params_.grad);
    T dots[kRows] = {};
    for_each_block([&](int64_t n, int keys, TileState state, const T* weights) {
      if (state == TileState::kEmpty) return;
      for (int r = 0; r < tile_.rows; ++r) {
        const Stored* const grad = rows[r] + n;
        if (kRows == 1 && state == TileState::kFull) {
          dots[r] += dot<T>(grad, weights, keys);
          continue;
        }
        T sum = T(0);
        for (int k = 0; k < keys; ++k) {
          if (mask_.keeps(state, k, r)) sum += weights[k * kRows + r] * static_cast<T>(grad[k]);
        }
        dots[r] += sum;
      }
    });
    for (int r = 0; r < tile_.rows; ++r) {
      params_.dots[tile_.scalar(p_, r)] = dots[r] * normaliser[r];
    }
  }

  typename Products::template Registers<kRows> registers_;
  const WeightsParams<T>& params_;
  const Problem<T>& p_;
  const Tile& tile_;
  KeyRange seen_;  // by some row
  T* scores_;      // [keys of seen_][kRows], then exp(S - max)
  T* bias_between_;
  MaskTile<T, kLanes> mask_;
  Query* query_;
  AlibiTile<T, 1> alibi_;
};

}  // namespace qkv::kernels::QKV_ISA
