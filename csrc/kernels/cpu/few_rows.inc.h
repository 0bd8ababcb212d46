#pragma once

#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/merge.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/worth_fetching.inc.h"
#include "kernels/online_softmax.h"

// Forward attention for up to 4 query rows (8 if vectors have 16 lanes) of a key/value head, as in
// generating token by token: bound by reading K and V, each number of which takes part in one or a
// few multiply-adds. Here vectors run along rows of K and V,
//
//     S[k][r] = <K_k, Q_r>          a sum over lanes for each key and row
//     O_r += P[k][r] · V_k          O in registers
//
// and Q, K and V may be stored in 16 bits. S and P are dense, so that a vector of exponentials has
// several keys; masks, softcap and ALiBi change them where they are.
//
// Products: few_rows_of_numbers.inc.h, few_rows_in_pairs.inc.h, few_rows_in_tiles.inc.h.

namespace qkv::kernels::QKV_ISA {

constexpr int kFewRowsBlockKeys = 128;

/// Whether they are better multiplied so than in tiles. Sums over lanes of more than four rows take
/// as long as the products of two vectors.
template <class T>
inline bool are_few_rows(const Problem<T>& p, int most) {
  const int64_t rows = rows_of_kv_head(p);
  return rows <= most && (rows <= 4 || p.head_dim >= 2 * Simd<T>::kWidth);
}

/// f(how many rows are multiplied where a head has `rows`, as a Constant): 1, or the least of
/// kLeastRows, twice as many, .. kMostRows that takes them. Those that are missing count as zeros.
template <class Products, int kRows = 1, class F>
QKV_INLINE void with_row_count(int64_t rows, F f) {
  if constexpr (kRows < Products::kMostRows) {
    constexpr int kNext = kRows == 1 ? Products::kLeastRows : 2 * kRows;
    if (rows > kRows) return with_row_count<Products, kNext>(rows, f);
  }
  f(Constant<kRows>{});
}

/// Room for the partial results as well, for when they are merged at once, and for queries that
/// take twice their numbers (few_rows_in_pairs.inc.h, few_rows_in_tiles.inc.h).
template <class T>
inline int64_t few_rows_scratch_bytes(const Problem<T>& p, int64_t rows) {
  constexpr int kWidth = Simd<T>::kWidth;
  const int64_t query = 2 * (p.head_dim + 2 * kWidth), out = 2 * (p.value_dim + kWidth) + 2;
  const int64_t numbers = rows * (query + out) + kFewRowsBlockKeys * (rows + 2 * kWidth);
  return numbers * static_cast<int64_t>(sizeof(T)) + 2 * kFewRowsBlockKeys / 8 * kWidth;
}

/// out[r][d] += sum over keys of weights[k][r] · value_k[d] where some of these have something in
/// them that is not finite: a row takes only those that it keeps.
template <int kRows, class T, class Stored>
inline void kept_values_of_few_rows(int keys, int64_t width, const Stored* value, int64_t value_row,
                                    const T* weights, const uint8_t* bits, int rows, T* out,
                                    int64_t out_row) {
  constexpr int kLanes = Simd<T>::kWidth;
  for (int r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < width; ++d) {
      T sum = T(0);
      for (int k = 0; k < keys; ++k) {
        if ((bits[k / 8 * kLanes + r] >> (k % 8) & 1) == 0) continue;
        sum = Simd<T>::fma(weights[k * kRows + r], static_cast<T>(value[k * value_row + d]), sum);
      }
      out[r * out_row + d] += sum;
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

/// The maxima of scores[key][kRows], -inf after the last up to a whole vector.
template <class T, int kRows>
inline typename Simd<T>::Number max_of_scores(int64_t keys, T* scores) {
  using S = Simd<T>;
  for (int64_t x = keys * kRows; x % S::kWidth != 0; ++x)
    scores[x] = -static_cast<T>(__builtin_inff());
  auto max = S::load(scores);
  for (int64_t x = S::kWidth; x < keys * kRows; x += S::kWidth) {
    max = S::maximum(max, S::load(scores + x));
  }
  return fold_lanes<T, kRows>(max, [](T a, T b) { return a > b ? a : b; });
}

/// Weights where scores[key][kRows] were; returns their sums.
template <class T, int kRows>
inline typename Simd<T>::Number weigh(int64_t keys, T* scores, typename Simd<T>::Number shift) {
  using S = Simd<T>;
  const auto of_lane = fold_lanes<T, kRows>(shift, [](T a, T) { return a; });
  auto sum = S::zero();
  for (int64_t x = 0; x < keys * kRows; x += S::kWidth) {
    const auto weight = VectorMath<T>::exp(S::load(scores + x) - of_lane);
    sum = sum + weight;
    S::store(scores + x, weight);
  }
  return fold_lanes<T, kRows>(sum, [](T a, T b) { return a + b; });
}

/// Weights that are dropped are 0.
template <int kRows, class T>
inline void drop(const uint8_t* stays, int keys, T* weights) {
  for (int k = 0; k < keys; ++k) {
    for (int r = 0; r < kRows; ++r) {
      const bool stays_k = stays[k / 8 * Simd<T>::kWidth + r] >> (k % 8) & 1;
      if (!stays_k) weights[k * kRows + r] = T(0);
    }
  }
}

/// The keys of `range` for all rows of one head, kRows of them or fewer, to partial[row].
template <class Products, class T, class Stored, int kRows>
inline void few_rows(const ForwardParams<T>& params, const RowTile<Simd<T>::kWidth>& tile,
                     KeyRange range, T* partial, T* scratch) {
  using S = Simd<T>;
  using Math = VectorMath<T>;
  using Query = typename Products::Query;
  const Problem<T>& p = params.problem;
  const int64_t out_row = round_up_to_vector<T>(p.value_dim);
  T* out = scratch;
  T* scores = out + kRows * out_row;
  T* bias_between = scores + kFewRowsBlockKeys * kRows;
  T* bias = bias_between + kFewRowsBlockKeys * S::kWidth;
  Query* query = reinterpret_cast<Query*>(bias + kFewRowsBlockKeys * S::kWidth);
  MaskTile<T, S::kWidth> mask{
      reinterpret_cast<uint8_t*>(query + Products::query_size(kRows, p.head_dim)), bias};
  uint8_t* stays = mask.bits + kFewRowsBlockKeys / 8 * S::kWidth;
  AlibiTile<T, 1> alibi;
  alibi.load(p, tile);
  set_to_zero(out, kRows * out_row);
  if (kRows > 1 && mask.has_bias(p)) set_to_zero(bias_between, kFewRowsBlockKeys * kRows);
  const Stored* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = r < tile.rows ? tile.template stored_row<Stored>(p.query, r) : nullptr;
  }
  [[maybe_unused]] typename Products::template Registers<kRows> registers;
  Products::template pack_query<kRows>(rows, p.head_dim, p.scale, query);
  const Stored* keys = tile.template stored_keys_of_head<Stored>(p.key);
  const Stored* values = tile.template stored_keys_of_head<Stored>(p.value);
  const bool drops = p.dropout.threshold != 0;

  OnlineSoftmax<Math> softmax;
  softmax.clear();
  for (int64_t n = first_of_eight(range.begin); n < range.end; n += kFewRowsBlockKeys) {
    const int block =
        range.end - n < kFewRowsBlockKeys ? static_cast<int>(range.end - n) : kFewRowsBlockKeys;
    const TileState state = mask.load_few_rows(p, tile, n, block, kFewRowsBlockKeys);
    if (state == TileState::kEmpty) continue;
    const Stored* block_values = values + n * p.value.row_stride;
    Products::template scores<kRows>(
        block, p.head_dim, keys + n * p.key.row_stride, p.key.row_stride, query, p.scale, scores,
        next_rows_of_few<kRows>(p, tile, p.value, {n, n + block}, p.value_dim));
    if (ScoreRows<T, 1, S::kWidth>(p, mask, alibi, n, 0, 0, state).changes()) {
      change_scores_of_few_rows<kRows, kFewRowsBlockKeys>(p, tile.rows, mask, alibi, n, block,
                                                          state, bias_between, scores);
    }
    const auto block_max = max_of_scores<T, kRows>(block, scores);
    if (S::any_greater(block_max, softmax.max)) {
      alignas(64) T correction[S::kWidth];
      S::store(correction, softmax.raise_max(block_max));
      for (int r = 0; r < kRows; ++r) {
        for (int64_t d = 0; d < out_row; ++d) out[r * out_row + d] *= correction[r];
      }
    }
    softmax.sum = softmax.sum + weigh<T, kRows>(block, scores, softmax.shift());
    if (drops) {
      load_dropout<S::kWidth>(p.dropout, tile, n, block, stays);
      drop<kRows>(stays, block, scores);
    }
    if (state == TileState::kPartial &&
        !all_finite<T>(block_values, p.value.row_stride, block, p.value_dim)) {
      kept_values_of_few_rows<kRows>(block, p.value_dim, block_values, p.value.row_stride, scores,
                                     mask.bits, tile.rows, out, out_row);
    } else {
      const KeyRange after = KeyRange{n + block, n + 2 * block}.intersection({0, range.end});
      Products::template add_values<kRows>(
          block, p.value_dim, block_values, p.value.row_stride, scores, out, out_row,
          next_rows_of_few<kRows>(p, tile, p.key, after, p.head_dim));
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

template <class Products, class T, class Stored>
inline void few_rows(const ForwardParams<T>& params, const RowTile<Simd<T>::kWidth>& tile,
                     KeyRange range, T* partial, T* scratch) {
  with_row_count<Products>(tile.rows, [&](auto rows) {
    few_rows<Products, T, Stored, rows()>(params, tile, range, partial, scratch);
  });
}

}  // namespace qkv::kernels::QKV_ISA
