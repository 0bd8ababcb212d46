#pragma once

#include "kernels/cpu/next_rows.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/transpose.inc.h"
#include "kernels/cpu/worth_fetching.inc.h"

namespace qkv::kernels::QKV_ISA {

template <class Stored>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

/// The products of few_rows.inc.h, T a number as it is multiplied, Stored one of K and V.
template <class T, class Stored>
struct FewRowsOfNumbers {
  using S = Simd<T>;
  using Number = typename S::Number;
  using Query = T;
  template <int kRows>
  struct Registers {};  // no others than vectors
  /// 4, or half of a vector's lanes: in a tile the other half would be empty.
  static constexpr int kMostRows = S::kWidth < 4 ? S::kWidth : S::kWidth < 16 ? 4 : 8;
  /// Of more than one.
  static constexpr int kLeastRows = 2;

  /// Numbers that a query takes: whole vectors.
  static int64_t query_size(int64_t rows, int64_t width) {
    return rows * round_up_to_vector<T>(width);
  }

  /// query[r][d], scale folded in; a row that is nullptr counts as zeros.
  template <int kRows>
  static void pack_query(const Stored* const (&from)[kRows], int64_t width, T scale, T* query) {
    const int64_t row = round_up_to_vector<T>(width);
    for (int r = 0; r < kRows; ++r, query += row) {
      if (from[r] == nullptr) {
        set_to_zero(query, row);
        continue;
      }
      int64_t d = 0;
      for (; d + S::kWidth <= width; d += S::kWidth) {
        S::store(query + d, S::set(scale) * load_stored<T>(from[r] + d));
      }
      if (d < width) S::store(query + d, S::set(scale) * load_first<T>(from[r] + d, width - d));
    }
  }

  /// scores[k][r] = <key_k, query_r>, whole vectors of them. Of several rows as many products at a
  /// time as a vector has lanes: their sums over lanes are one vector in the end.
  template <int kRows>
  static QKV_ONE_COPY void scores(int keys, int64_t width, const Stored* key, int64_t key_row,
                                  const T* query, T /*scale*/, T* scores, const NextRows& next) {
    constexpr int kKeys = kRows == 1 ? kKeysOfOneRow : S::kWidth / kRows;
    const int64_t query_row = round_up_to_vector<T>(width);
    const int64_t whole = width / S::kWidth * S::kWidth;
    for (int first = 0; first < keys; first += kKeys, scores += kKeys * kRows) {
      const int count = keys - first < kKeys ? keys - first : kKeys;
      const Stored* row[kKeys];  // of the last key again where there is none
      for (int k = 0; k < kKeys; ++k) {
        row[k] = key + (first + (k < count ? k : count - 1)) * key_row;
      }
      next.fetch(first, count);
      Number sum[kKeys * kRows];
      for (auto& s : sum) s = S::zero();
      const auto add = [&](int64_t d, auto load) __attribute__((always_inline)) {
        Number q[kRows];
        for (int r = 0; r < kRows; ++r) q[r] = S::load(query + r * query_row + d);
#pragma GCC unroll 4
        for (int k = 0; k < kKeys; ++k) {
          const auto x = load(row[k] + d);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[k * kRows + r] = S::fma(x, q[r], sum[k * kRows + r]);
        }
      };
      for (int64_t d = 0; d < whole; d += S::kWidth) add(d, WholeVector{});
      if (whole < width) add(whole, StartOfVector{width - whole});
      if constexpr (kRows > 1) {
        S::store(scores, sums_over_lanes<T>(sum));
      } else if constexpr (kKeys == 1) {
        scores[0] = S::sum(sum[0]);
      } else {
        S::store_sum_of_quarters(scores, sums_in_quarters<T>(sum[0], sum[1], sum[2], sum[3]));
      }
    }
  }

  /// out[r][d] += sum over keys of weights[k][r] · value_k[d]
  template <int kRows>
  static void add_values(int keys, int64_t width, const Stored* value, int64_t value_row,
                         const T* weights, T* out, int64_t out_row, const NextRows& next) {
    constexpr int kMost = most_columns(kRows);
    const int vectors = static_cast<int>(width / S::kWidth);
    const int64_t left = width - vectors * S::kWidth;
    const int passes = (vectors + kMost - 1) / kMost + (left > 0 ? 1 : 0);
    int pass = 0;
    for (int v = 0; v < vectors; v += kMost, ++pass) {
      const int64_t d = v * S::kWidth;
      with_columns<kMost>(vectors - v, [&](auto columns) {
        add_columns<kRows, columns()>(keys, value + d, value_row, weights, out + d, out_row,
                                      WholeVector{}, {next, pass, passes});
      });
    }
    if (left == 0) return;
    const int64_t d = vectors * S::kWidth;
    add_columns<kRows, 1>(keys, value + d, value_row, weights, out + d, out_row,
                          StartOfVector{left}, {next, pass, passes});
  }

  /// to_k[d] = sum over rows of weights[k][r] · rows[r][d]. Rows are whole vectors.
  template <int kRows>
  static void rows_of_keys(int keys, int64_t width, const T* weights, const T* rows, Stored* to,
                           int64_t to_row) {
    constexpr int kMost = most_columns(kRows);
    const int64_t row = round_up_to_vector<T>(width);
    const int vectors = static_cast<int>(width / S::kWidth);
    const int64_t left = width - vectors * S::kWidth;
    for (int v = 0; v < vectors; v += kMost) {
      const int64_t d = v * S::kWidth;
      with_columns<kMost>(vectors - v, [&](auto columns) {
        columns_of_keys<kRows, columns()>(
            keys, weights, rows + d, row, to + d, to_row,
            [](Stored * at, Number x) __attribute__((always_inline)) { store_rounded<T>(at, x); });
      });
    }
    if (left == 0) return;
    const int64_t d = vectors * S::kWidth;
    columns_of_keys<kRows, 1>(
        keys, weights, rows + d, row, to + d,
        to_row, [left](Stored * at, Number x) __attribute__((always_inline)) {
          store_first<T>(at, x, left);
        });
  }

 private:
  /// Keys of one row that sums over lanes are taken of at a time. With four, memory is asked for
  /// four rows at once, which AMD's processors, for which fewer sums are kept in registers, take
  /// longer for.
  static constexpr int kKeysOfOneRow = kIsForIntel && kHasFourQuads<T> ? 4 : 1;

  // A row is read, to be written as a whole, unless it is in a cache.
  static constexpr int kRowsAhead = 16;

  /// How columns are loaded.
  struct WholeVector {
    QKV_INLINE Number operator()(const Stored* x) const { return load_stored<T>(x); }
  };
  struct StartOfVector {
    int64_t columns;
    QKV_INLINE Number operator()(const Stored* x) const { return load_first<T>(x, columns); }
  };

  /// Vectors of columns whose sums stay in registers.
  static constexpr int most_columns(int rows) {
    const int sums = S::kMostSums / rows;
    return sums < 4 ? sums : 4;
  }

  /// f(as many vectors as are left, kMost of them or fewer, as a Constant)
  template <int kMost, class F>
  static void with_columns(int left, F f) {
    if constexpr (kMost > 1) {
      if (left < kMost) return with_columns<kMost - 1>(left, f);
    }
    f(Constant<kMost>{});
  }

  /// kVectors vectors of columns. Keys are summed before they are added to out, as in multiply_add.
  template <int kRows, int kVectors, class Load>
  static void add_columns(int keys, const Stored* value, int64_t value_row, const T* weights,
                          T* out, int64_t out_row, Load load, ShareOfNextRows next) {
    Number sum[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::zero();
    }
    for (int k = 0; k < keys; ++k) {
      const Stored* row = value + k * value_row;
      next.fetch_next();
      Number x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load(row + v * S::kWidth);
      for (int r = 0; r < kRows; ++r) {
        const auto weight = S::set(weights[k * kRows + r]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = S::fma(weight, x[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        T* to = out + r * out_row + v * S::kWidth;
        S::store(to, S::load(to) + sum[r][v]);
      }
    }
  }

  /// kVectors vectors of columns, each stored as store(to, sum).
  template <int kRows, int kVectors, class Store>
  static void columns_of_keys(int keys, const T* weights, const T* rows, int64_t row, Stored* to,
                              int64_t to_row, Store store) {
    Number x[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) x[r][v] = S::load(rows + r * row + v * S::kWidth);
    }
    for (int k = 0; k < keys; ++k, weights += kRows, to += to_row) {
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(to + kRowsAhead * to_row + v * S::kWidth, 1);
      }
      Number sum[kVectors];
      for (int v = 0; v < kVectors; ++v) sum[v] = S::set(weights[0]) * x[0][v];
      for (int r = 1; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sum[v] = S::fma(S::set(weights[r]), x[r][v], sum[v]);
      }
      for (int v = 0; v < kVectors; ++v) store(to + v * S::kWidth, sum[v]);
    }
  }
};

}  // namespace qkv::kernels::QKV_ISA
