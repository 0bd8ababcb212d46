#pragma once

#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/logsumexp.h"

// Rows of the output on their way to memory: as they are, or rounded to 16 bits, with what rounding
// took from them beside it. And their lse.

namespace qkv::kernels::QKV_ISA {

template <class T, int kRows>
class OutputRows {
 public:
  OutputRows(const ForwardParams<T>& params, const RowTile<kRows>& tile)
      : params_(params), tile_(tile) {}

  /// Columns first .. first + width of row r.
  void write(int r, int64_t first, int64_t width, const T* x) const {
    if constexpr (sizeof(T) == 4) {
      if (params_.out_storage == Storage::kBFloat16) return round<BFloat16>(r, first, width, x);
      if (params_.out_storage == Storage::kFloat16) return round<Float16>(r, first, width, x);
    }
    T* to = tile_.row(params_.out, r) + first;
    for (int64_t d = 0; d < width; ++d) to[d] = x[d];
  }

  /// out[r][d] = scale[r] · from[d][r]
  void write_transposed(const T* from, const T* scale) const {
    if constexpr (sizeof(T) == 4) {
      switch (params_.out_storage) {
        case Storage::kBFloat16:
          return round_transposed<BFloat16>(from, scale);
        case Storage::kFloat16:
          return round_transposed<Float16>(from, scale);
        case Storage::kSame:
          break;
      }
    }
    tile_.unpack_transposed(from, params_.problem.value_dim, scale, params_.out);
  }

 private:
  using S = Simd<T>;

  template <class Stored>
  QKV_ONE_COPY void round_transposed(const T* from, const T* scale) const {
    const int64_t width = params_.problem.value_dim;
    const auto rows = tile_.template stored_rows_in<Stored>(params_.out),
               rests = tile_.template stored_rows_in<Stored>(params_.out_rest);
    for (int r = 0; r < tile_.rows; r += S::kWidth) {
      Stored *to[S::kWidth], *rest[S::kWidth];
      for (int l = 0; l < S::kWidth; ++l) {
        const bool is_row = r + l < tile_.rows;
        to[l] = is_row ? rows[r + l] : nullptr;
        rest[l] = is_row ? rests[r + l] : nullptr;
      }
      put_columns<T>(
          from + r, kRows, width, S::load(scale + r),
          [&](int l, int64_t d, typename S::Number x, int count) __attribute__((always_inline)) {
            if (to[l] == nullptr) return;
            if (count == S::kWidth) {
              store_rounded<T>(to[l] + d, x);
              if (rest[l] == nullptr) return;
              store_rounded<T>(rest[l] + d, x - load_stored<T>(to[l] + d));
            } else {
              store_first<T>(to[l] + d, x, count);
              if (rest[l] == nullptr) return;
              store_first<T>(rest[l] + d, x - load_first<T>(to[l] + d, count), count);
            }
          });
    }
  }

  template <class Stored>
  void round(int r, int64_t first, int64_t width, const T* x) const {
    Stored* to = tile_.template stored_row<Stored>(params_.out, r) + first;
    Stored* rest = tile_.template stored_row<Stored>(params_.out_rest, r) + first;
    const bool needs_rest = params_.out_rest.data != nullptr;
    int64_t d = 0;
    for (; d + S::kWidth <= width; d += S::kWidth) {
      const auto exact = S::load(x + d);
      store_rounded<T>(to + d, exact);
      if (!needs_rest) continue;
      store_rounded<T>(rest + d, exact - load_stored<T>(to + d));
    }
    if (const int64_t left = width - d; left > 0) {
      const auto exact = load_first<T>(x + d, left);
      store_first<T>(to + d, exact, left);
      if (!needs_rest) return;
      store_first<T>(rest + d, exact - load_first<T>(to + d, left), left);
    }
  }

  const ForwardParams<T>& params_;
  const RowTile<kRows>& tile_;
};

/// lse and what rounding took from it, of the maximum of a row and the sum under it, a sink
/// included.
template <class T, int kRows>
inline void write_logsumexp(const ForwardParams<T>& params, const RowTile<kRows>& tile,
                            const T* max, const T* sum, const bool* has_keys) {
  using S = Simd<T>;
  static_assert(kRows % S::kWidth == 0);
  alignas(64) T lse[kRows], rest[kRows];
  for (int r = 0; r < tile.rows; r += S::kWidth) {
    typename S::Number lse_of_rows, rest_of_rows;
    log_of_sums<VectorMath<T>>(S::load(max + r), S::load(sum + r), lse_of_rows, rest_of_rows);
    S::store(lse + r, lse_of_rows);
    S::store(rest + r, rest_of_rows);
  }
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t scalar = tile.scalar(params.problem, r);
    params.lse[scalar] = lse[r];
    params.lse_rest[scalar] = has_keys[r] ? rest[r] : kRestWithoutKeys<T>;
  }
}

}  // namespace qkv::kernels::QKV_ISA
