#pragma once

#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/merge.inc.h"
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
// and K and V may be stored in 16 bits. The scores between the two products lie as everywhere else,
// so that masks, softcap, ALiBi and dropout are the same code.

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

/// Rows that are read next. K and V take turns, so the processor itself does not see them coming.
template <class Stored>
struct NextRows {
  const Stored* first;
  int64_t row;
  int64_t width;
  int count;

  QKV_INLINE void fetch(int k) const {
    if (k >= count) return;
    constexpr int kLine = 64 / sizeof(Stored);
    for (int64_t d = 0; d < width; d += kLine) __builtin_prefetch(first + k * row + d);
  }
};

/// scores[k][r] = <key_k, query_r>; query is [r][width rounded up to vectors]. Of several rows as
/// many products at a time as a vector has lanes: their sums over lanes are one vector in the end.
template <class T, class Stored, int kRows>
inline void products_of_few_rows(int keys, int64_t width, const Stored* key, int64_t key_row,
                                 const T* query, int64_t query_row, T* scores,
                                 const NextRows<Stored>& next) {
  using S = Simd<T>;
  constexpr int kKeys = kRows == 1 ? 1 : S::kWidth / kRows;
  const int64_t whole = width / S::kWidth * S::kWidth;
  for (int first = 0; first < keys; first += kKeys) {
    const int count = keys - first < kKeys ? keys - first : kKeys;
    const Stored* row[kKeys];  // of the last key again where there is none
    for (int k = 0; k < kKeys; ++k) row[k] = key + (first + (k < count ? k : count - 1)) * key_row;
    for (int k = 0; k < count; ++k) next.fetch(first + k);
    typename S::Number sum[kKeys * kRows];
    for (auto& s : sum) s = S::zero();
    for (int64_t d = 0; d < whole; d += S::kWidth) {
      typename S::Number q[kRows];
      for (int r = 0; r < kRows; ++r) q[r] = S::load(query + r * query_row + d);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) {
        const auto x = load_stored<T>(row[k] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[k * kRows + r] = S::fma(x, q[r], sum[k * kRows + r]);
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
        T& score = scores[(first + k) * S::kWidth + r];
        score = total[k * kRows + r];
        for (int64_t d = whole; d < width; ++d) {
          score += static_cast<T>(row[k][d]) * query[r * query_row + d];
        }
      }
    }
  }
}

/// out_r[d] += sum over keys of weights[k][r] · value_k[d], for kVectors vectors of d.
template <class T, class Stored, int kRows, int kVectors>
inline void add_values(int keys, const Stored* value, int64_t value_row, const T* weights, T* out,
                       int64_t out_row, const NextRows<Stored>& next) {
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
      const auto weight = S::set(weights[k * S::kWidth + r]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::fma(weight, x[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) S::store(out + r * out_row + v * S::kWidth, sum[r][v]);
  }
}

template <class T, class Stored, int kRows>
inline void values_of_few_rows(int keys, int64_t width, const Stored* value, int64_t value_row,
                               const T* weights, T* out, int64_t out_row, NextRows<Stored> next) {
  using S = Simd<T>;
  int64_t d = 0;
  for (; d + 4 * S::kWidth <= width; d += 4 * S::kWidth) {
    add_values<T, Stored, kRows, 4>(keys, value + d, value_row, weights, out + d, out_row, next);
    next.count = 0;
  }
  for (; d + S::kWidth <= width; d += S::kWidth) {
    add_values<T, Stored, kRows, 1>(keys, value + d, value_row, weights, out + d, out_row, next);
    next.count = 0;
  }
  for (; d < width; ++d) {
    for (int r = 0; r < kRows; ++r) {
      T& sum = out[r * out_row + d];
      for (int k = 0; k < keys; ++k) {
        sum += weights[k * S::kWidth + r] * static_cast<T>(value[k * value_row + d]);
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

/// The keys of `range` for all rows of one head, kRows of them or fewer, to partial[row].
template <class T, class Stored, int kRows>
inline void few_rows(const ForwardParams<T>& params, const RowTile<Simd<T>::kWidth>& tile,
                     KeyRange range, T* partial, T* scratch) {
  using S = Simd<T>;
  using Math = VectorMath<T>;
  const Problem<T>& p = params.problem;
  const auto width_of = [](int64_t width) {
    return (width + S::kWidth - 1) / S::kWidth * S::kWidth;
  };
  const int64_t query_row = width_of(p.head_dim), out_row = width_of(p.value_dim);
  T* query = scratch;
  T* out = query + kRows * query_row;
  T* scores = out + kRows * out_row;
  T* bias = scores + kFewRowsBlockKeys * S::kWidth;
  MaskTile<T, S::kWidth> mask{reinterpret_cast<uint8_t*>(bias + kFewRowsBlockKeys * S::kWidth),
                              bias};
  uint8_t* stays = mask.bits + kFewRowsBlockKeys / 8 * S::kWidth;
  AlibiTile<T, 1> alibi;
  alibi.load(p, tile);
  for (int64_t x = 0; x < kRows * (query_row + out_row); ++x) query[x] = T(0);
  for (int r = 0; r < tile.rows; ++r) {
    const T* from = tile.row(p.query, r);
    for (int64_t d = 0; d < p.head_dim; ++d) query[r * query_row + d] = p.scale * from[d];
  }
  set_to_zero(scores, kFewRowsBlockKeys * S::kWidth);  // lanes without a row stay 0
  const Stored* keys = tile.template stored_keys_of_head<Stored>(p.key);
  const Stored* values = tile.template stored_keys_of_head<Stored>(p.value);

  OnlineSoftmax<Math> softmax;
  softmax.clear();
  for (int64_t n = first_of_eight(range.begin); n < range.end; n += kFewRowsBlockKeys) {
    const int block =
        range.end - n < kFewRowsBlockKeys ? static_cast<int>(range.end - n) : kFewRowsBlockKeys;
    const TileState state = mask.load(p, tile, n, block);
    if (state == TileState::kEmpty) continue;
    const Stored* block_values = values + n * p.value.row_stride;
    products_of_few_rows<T, Stored, kRows>(
        block, p.head_dim, keys + n * p.key.row_stride, p.key.row_stride, query, query_row, scores,
        NextRows<Stored>{block_values, p.value.row_stride, p.value_dim, block});
    const ScoreRows<T, 1, S::kWidth> block_scores(p, mask, alibi, n, 0, 0, state);
    typename S::Number block_max[1];
    block_scores.change(block, scores, block_max);

    if (S::any_greater(block_max[0], softmax.max)) {
      alignas(64) T correction[S::kWidth];
      S::store(correction, softmax.raise_max(block_max[0]));
      for (int r = 0; r < kRows; ++r) {
        for (int64_t d = 0; d < out_row; ++d) out[r * out_row + d] *= correction[r];
      }
    }
    const auto shift = softmax.shift();
    const bool drops = p.dropout.threshold != 0;
    if (drops) load_dropout<S::kWidth>(p.dropout, tile, n, block, stays);
    for (int k = 0; k < block; ++k) {
      T* s = scores + k * S::kWidth;
      const auto weight = softmax.weight(S::load(s), shift);
      S::store(s, drops ? undropped<T, S::kWidth>(stays, k, 0, weight) : weight);
    }
    if (state == TileState::kPartial &&
        !all_finite<T>(block_values, p.value.row_stride, block, p.value_dim)) {
      kept_values_of_few_rows<T>(block, p.value_dim, block_values, p.value.row_stride, scores,
                                 mask.bits, tile.rows, out, out_row);
    } else {
      const int64_t after = n + block, left = range.end - after;
      values_of_few_rows<T, Stored, kRows>(
          block, p.value_dim, block_values, p.value.row_stride, scores, out, out_row,
          NextRows<Stored>{keys + after * p.key.row_stride, p.key.row_stride, p.head_dim,
                           static_cast<int>(left < block ? left : block)});
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

template <class T, class Stored>
inline void few_rows(const ForwardParams<T>& params, const RowTile<Simd<T>::kWidth>& tile,
                     KeyRange range, T* partial, T* scratch) {
  if (tile.rows == 1) return few_rows<T, Stored, 1>(params, tile, range, partial, scratch);
  return few_rows<T, Stored, kFewRows<T>>(params, tile, range, partial, scratch);
}

}  // namespace qkv::kernels::QKV_ISA
