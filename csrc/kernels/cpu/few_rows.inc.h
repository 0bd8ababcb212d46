#pragma once

#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/merge.inc.h"
#include "kernels/cpu/next_rows.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/transpose.inc.h"
#include "kernels/online_softmax.h"

// Forward attention for up to 4 query rows (2 if a vector has no more lanes) of a key/value head,
// as in generating token by token: bound by reading K and V, each number of which takes part in one
// or a few multiply-adds. Here vectors run along rows of K and V,
//
//     S[k][r] = <K_k, Q_r>          a sum over lanes for each key and row
//     O_r += P[k][r] · V_k          O in registers
//
// and Q, K and V may be stored in 16 bits. Scores that masks, softcap, ALiBi or dropout change lie
// as everywhere else, so that this is the same code: [key][lanes]. Others are dense: [key][rows].

namespace qkv::kernels::QKV_ISA {

template <class T>
constexpr int kFewRows = Simd<T>::kWidth < 4 ? Simd<T>::kWidth : 4;
constexpr int kFewRowsBlockKeys = 128;

/// Room for the partial results as well, for when they are merged at once.
template <class T>
inline int64_t few_rows_scratch_bytes(const Problem<T>& p) {
  constexpr int kWidth = Simd<T>::kWidth;
  const int64_t rows = kFewRows<T> * (p.head_dim + 2 * p.value_dim + 2 * kWidth + 2);
  const int64_t numbers = rows + 2 * kFewRowsBlockKeys * kWidth;
  return numbers * static_cast<int64_t>(sizeof(T)) + 2 * kFewRowsBlockKeys / 8 * kWidth;
}

/// A vector of the terms of a score: keys of 16 bits are converted, queries have the scale in them.
template <class T, class Stored>
struct TermsOfNumbers {
  using Query = T;
  using Factor = typename Simd<T>::Number;
  static constexpr int kColumns = Simd<T>::kWidth;
  static constexpr bool kScales = true;  // queries, before they are multiplied

  static QKV_INLINE Factor query(const Query* x) { return Simd<T>::load(x); }
  static QKV_INLINE Factor key(const Stored* x) { return load_stored<T>(x); }
  static QKV_INLINE Factor add(Factor key, Factor query, Factor sum) {
    return Simd<T>::fma(key, query, sum);
  }
};

/// scores[k][r] = <key_k, query_r>; query is [r][width rounded up to vectors]. Of several rows as
/// many products at a time as a vector has lanes: their sums over lanes are one vector in the end.
template <class Terms, class T, class Stored, int kRows>
inline void products_of_few_rows(int keys, int64_t width, const Stored* key, int64_t key_row,
                                 const typename Terms::Query* query, int64_t query_row, T scale,
                                 T* scores, int64_t score_row, const NextRows& next) {
  using S = Simd<T>;
  constexpr int kKeys = kRows == 1 ? 1 : S::kWidth / kRows;
  const int64_t whole = width / Terms::kColumns * Terms::kColumns;
  for (int first = 0; first < keys; first += kKeys) {
    const int count = keys - first < kKeys ? keys - first : kKeys;
    const Stored* row[kKeys];  // of the last key again where there is none
    for (int k = 0; k < kKeys; ++k) row[k] = key + (first + (k < count ? k : count - 1)) * key_row;
    for (int k = 0; k < count; ++k) next.fetch(first + k);
    typename S::Number sum[kKeys * kRows];
    for (auto& s : sum) s = S::zero();
    for (int64_t d = 0; d < whole; d += Terms::kColumns) {
      typename Terms::Factor q[kRows];
      for (int r = 0; r < kRows; ++r) q[r] = Terms::query(query + r * query_row + d);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) {
        const auto x = Terms::key(row[k] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sum[k * kRows + r] = Terms::add(x, q[r], sum[k * kRows + r]);
      }
    }
    alignas(64) T total[S::kWidth];
    if constexpr (kRows == 1) {
      total[0] = S::sum(sum[0]);
    } else {
      S::store(total, sums_over_lanes<T>(sum));
    }
    for (int k = 0; k < count; ++k) {
      for (int r = 0; r < kRows; ++r) {
        T score = total[k * kRows + r];
        for (int64_t d = whole; d < width; ++d) {
          score += static_cast<T>(row[k][d]) * static_cast<T>(query[r * query_row + d]);
        }
        scores[(first + k) * score_row + r] = Terms::kScales ? score : scale * score;
      }
    }
  }
}

/// out_r[d] += sum over keys of weights[k][r] · value_k[d], for kVectors vectors of d.
template <class T, class Stored, int kRows, int kVectors>
inline void add_values(int keys, const Stored* value, int64_t value_row, const T* weights,
                       int64_t weight_row, T* out, int64_t out_row, const NextRows& next) {
  using S = Simd<T>;
  typename S::Number sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = S::load(out + r * out_row + v * S::kWidth);
  }
  for (int k = 0; k < keys; ++k) {
    const Stored* row = value + k * value_row;
    next.fetch(k);
    typename S::Number x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load_stored<T>(row + v * S::kWidth);
    for (int r = 0; r < kRows; ++r) {
      const auto weight = S::set(weights[k * weight_row + r]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::fma(weight, x[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) S::store(out + r * out_row + v * S::kWidth, sum[r][v]);
  }
}

template <class T, class Stored, int kRows>
inline void values_of_few_rows(int keys, int64_t width, const Stored* value, int64_t value_row,
                               const T* weights, int64_t weight_row, T* out, int64_t out_row,
                               NextRows next) {
  using S = Simd<T>;
  int64_t d = 0;
  for (; d + 4 * S::kWidth <= width; d += 4 * S::kWidth) {
    add_values<T, Stored, kRows, 4>(keys, value + d, value_row, weights, weight_row, out + d,
                                    out_row, next);
    next.count = 0;
  }
  for (; d + S::kWidth <= width; d += S::kWidth) {
    add_values<T, Stored, kRows, 1>(keys, value + d, value_row, weights, weight_row, out + d,
                                    out_row, next);
    next.count = 0;
  }
  for (; d < width; ++d) {
    for (int r = 0; r < kRows; ++r) {
      T& sum = out[r * out_row + d];
      for (int k = 0; k < keys; ++k) {
        sum += weights[k * weight_row + r] * static_cast<T>(value[k * value_row + d]);
      }
    }
  }
}

/// The same for keys some of which have something in them that is not finite: a row takes only
/// those that it keeps.
template <class T, class Stored>
inline void kept_values_of_few_rows(int keys, int64_t width, const Stored* value, int64_t value_row,
                                    const T* weights, const uint8_t* bits, int rows, T* out,
                                    int64_t out_row) {
  constexpr int kLanes = Simd<T>::kWidth;
  for (int k = 0; k < keys; ++k) {
    for (int r = 0; r < rows; ++r) {
      if ((bits[k / 8 * kLanes + r] >> (k % 8) & 1) == 0) continue;
      for (int64_t d = 0; d < width; ++d) {
        out[r * out_row + d] += weights[k * kLanes + r] * static_cast<T>(value[k * value_row + d]);
      }
    }
  }
}

/// Lane l, and l + kRows, ..: f over the same lanes of x.
template <class T, int kRows, class F>
inline typename Simd<T>::Number fold_lanes(typename Simd<T>::Number x, F f) {
  constexpr int kWidth = Simd<T>::kWidth;
  alignas(64) T lane[kWidth];
  Simd<T>::store(lane, x);
  for (int l = kRows; l < kWidth; ++l) lane[l % kRows] = f(lane[l % kRows], lane[l]);
  for (int l = kRows; l < kWidth; ++l) lane[l] = lane[l % kRows];
  return Simd<T>::load(lane);
}

/// The maxima of dense scores[key][kRows], -inf after the last up to a whole vector.
template <class T, int kRows>
inline typename Simd<T>::Number max_of_dense(int keys, T* scores) {
  using S = Simd<T>;
  for (int x = keys * kRows; x % S::kWidth != 0; ++x) scores[x] = -static_cast<T>(__builtin_inff());
  auto max = S::load(scores);
  for (int x = S::kWidth; x < keys * kRows; x += S::kWidth) {
    max = S::maximum(max, S::load(scores + x));
  }
  return fold_lanes<T, kRows>(max, [](T a, T b) { return a > b ? a : b; });
}

/// Weights where dense scores[key][kRows] were; returns their sums.
template <class T, int kRows>
inline typename Simd<T>::Number weigh_dense(int keys, T* scores, typename Simd<T>::Number shift) {
  using S = Simd<T>;
  const auto of_lane = fold_lanes<T, kRows>(shift, [](T a, T) { return a; });
  auto sum = S::zero();
  for (int x = 0; x < keys * kRows; x += S::kWidth) {
    const auto weight = VectorMath<T>::exp(S::load(scores + x) - of_lane);
    sum = sum + weight;
    S::store(scores + x, weight);
  }
  return fold_lanes<T, kRows>(sum, [](T a, T b) { return a + b; });
}

/// The keys of `range` for all rows of one head, kRows of them or fewer, to partial[row].
template <class Terms, class T, class Stored, int kRows>
inline void few_rows(const ForwardParams<T>& params, const RowTile<Simd<T>::kWidth>& tile,
                     KeyRange range, T* partial, T* scratch) {
  using S = Simd<T>;
  using Math = VectorMath<T>;
  using Query = typename Terms::Query;
  const Problem<T>& p = params.problem;
  const int64_t query_row = round_up_to_vector<T>(p.head_dim);
  const int64_t out_row = round_up_to_vector<T>(p.value_dim);
  T* out = scratch;
  T* scores = out + kRows * out_row;
  T* bias = scores + kFewRowsBlockKeys * S::kWidth;
  Query* query = reinterpret_cast<Query*>(bias + kFewRowsBlockKeys * S::kWidth);
  MaskTile<T, S::kWidth> mask{reinterpret_cast<uint8_t*>(query + kRows * query_row), bias};
  uint8_t* stays = mask.bits + kFewRowsBlockKeys / 8 * S::kWidth;
  AlibiTile<T, 1> alibi;
  alibi.load(p, tile);
  for (int64_t x = 0; x < kRows * out_row; ++x) out[x] = T(0);
  for (int64_t x = 0; x < kRows * query_row; ++x) query[x] = Query{};
  for (int r = 0; r < tile.rows; ++r) {
    const Stored* from = tile.template stored_row<Stored>(p.query, r);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      if constexpr (Terms::kScales) {
        query[r * query_row + d] = p.scale * static_cast<T>(from[d]);
      } else {
        query[r * query_row + d] = from[d];
      }
    }
  }
  set_to_zero(scores, kFewRowsBlockKeys * S::kWidth);  // lanes without a row are read as well
  const Stored* keys = tile.template stored_keys_of_head<Stored>(p.key);
  const Stored* values = tile.template stored_keys_of_head<Stored>(p.value);
  const bool drops = p.dropout.threshold != 0;

  OnlineSoftmax<Math> softmax;
  softmax.clear();
  for (int64_t n = first_of_eight(range.begin); n < range.end; n += kFewRowsBlockKeys) {
    const int block =
        range.end - n < kFewRowsBlockKeys ? static_cast<int>(range.end - n) : kFewRowsBlockKeys;
    const TileState state = mask.load(p, tile, n, block);
    if (state == TileState::kEmpty) continue;
    const ScoreRows<T, 1, S::kWidth> block_scores(p, mask, alibi, n, 0, 0, state);
    const bool dense = !drops && !block_scores.changes();
    const int64_t score_row = dense ? kRows : S::kWidth;
    const Stored* block_values = values + n * p.value.row_stride;
    products_of_few_rows<Terms, T, Stored, kRows>(
        block, p.head_dim, keys + n * p.key.row_stride, p.key.row_stride, query, query_row, p.scale,
        scores, score_row, next_rows<T>(tile, p.value, p.key_value_storage, {n, n + block}, p.value_dim));
    typename S::Number block_max[1];
    if (dense) {
      block_max[0] = max_of_dense<T, kRows>(block, scores);
    } else {
      block_scores.change(block, scores, block_max);
    }

    if (S::any_greater(block_max[0], softmax.max)) {
      alignas(64) T correction[S::kWidth];
      S::store(correction, softmax.raise_max(block_max[0]));
      for (int r = 0; r < kRows; ++r) {
        for (int64_t d = 0; d < out_row; ++d) out[r * out_row + d] *= correction[r];
      }
    }
    const auto shift = softmax.shift();
    if (dense) {
      softmax.sum = softmax.sum + weigh_dense<T, kRows>(block, scores, shift);
    } else {
      if (drops) load_dropout<S::kWidth>(p.dropout, tile, n, block, stays);
      for (int k = 0; k < block; ++k) {
        T* s = scores + k * S::kWidth;
        const auto weight = softmax.weight(S::load(s), shift);
        S::store(s, drops ? undropped<T, S::kWidth>(stays, k, 0, weight) : weight);
      }
    }
    if (state == TileState::kPartial &&
        !all_finite<T>(block_values, p.value.row_stride, block, p.value_dim)) {
      kept_values_of_few_rows<T>(block, p.value_dim, block_values, p.value.row_stride, scores,
                                 mask.bits, tile.rows, out, out_row);
    } else {
      const KeyRange after = KeyRange{n + block, n + 2 * block}.intersection({0, range.end});
      values_of_few_rows<T, Stored, kRows>(
          block, p.value_dim, block_values, p.value.row_stride, scores, score_row, out, out_row,
          next_rows<T>(tile, p.key, p.key_value_storage, after, p.head_dim));
    }
  }

  alignas(64) T max[S::kWidth], sum[S::kWidth];
  S::store(max, softmax.max);
  S::store(sum, softmax.sum);
  for (int r = 0; r < tile.rows; ++r) {
    T* to = partial + r * partial_row(p);
    for (int64_t d = 0; d < p.value_dim; ++d) to[d] = out[r * out_row + d];
    to[p.value_dim] = max[r];
    to[p.value_dim + 1] = sum[r];
  }
}

template <class Terms, class T, class Stored>
inline void few_rows(const ForwardParams<T>& params, const RowTile<Simd<T>::kWidth>& tile,
                     KeyRange range, T* partial, T* scratch) {
  if (tile.rows == 1) return few_rows<Terms, T, Stored, 1>(params, tile, range, partial, scratch);
  return few_rows<Terms, T, Stored, kFewRows<T>>(params, tile, range, partial, scratch);
}

}  // namespace qkv::kernels::QKV_ISA
