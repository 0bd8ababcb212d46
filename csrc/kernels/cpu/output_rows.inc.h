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
  static constexpr int kColumns = 64;  // at once

  OutputRows(const ForwardParams<T>& params, const RowTile<kRows>& tile)
      : params_(params), tile_(tile) {}

  /// Columns first .. first + width of row r.
  void write(int r, int64_t first, int64_t width, const T* x) const {
    const Operand<T>& out = params_.out;
    if constexpr (sizeof(T) == 4) {
      if (params_.out_storage == Storage::kBFloat16) return round<BFloat16>(r, first, width, x);
      if (params_.out_storage == Storage::kFloat16) return round<Float16>(r, first, width, x);
    }
    T* to = tile_.row(out, r) + first * out.column_stride;
    for (int64_t d = 0; d < width; ++d) to[d * out.column_stride] = x[d];
  }

  /// out[r][d] = scale[r] · from[d][r]
  void write_transposed(const T* from, const T* scale) const {
    using S = Simd<T>;
    const int64_t width = params_.problem.value_dim;
    if (params_.out_storage == Storage::kSame) {
      tile_.unpack_transposed(from, width, scale, params_.out);
      return;
    }
    alignas(64) T lines[S::kWidth][kColumns];
    T* to[S::kWidth];
    for (int l = 0; l < S::kWidth; ++l) to[l] = lines[l];
    for (int r = 0; r < tile_.rows; r += S::kWidth) {
      const int rows = tile_.rows - r < S::kWidth ? tile_.rows - r : S::kWidth;
      for (int64_t d = 0; d < width; d += kColumns) {
        const int64_t columns = width - d < kColumns ? width - d : kColumns;
        transpose_columns<T, T>(from + d * kRows + r, kRows, columns, S::load(scale + r), to);
        for (int l = 0; l < rows; ++l) write(r + l, d, columns, lines[l]);
      }
    }
  }

 private:
  template <class Stored>
  void round(int r, int64_t first, int64_t width, const T* x) const {
    using S = Simd<T>;
    const int64_t column = params_.out.column_stride, rest_column = params_.out_rest.column_stride;
    Stored* to = tile_.template stored_row<Stored>(params_.out, r) + first * column;
    Stored* rest = tile_.template stored_row<Stored>(params_.out_rest, r) + first * rest_column;
    int64_t d = 0;
    if (column == 1 && rest_column == 1) {
      for (; d + S::kWidth <= width; d += S::kWidth) {
        const auto exact = S::load(x + d);
        store_rounded<T>(to + d, exact);
        store_rounded<T>(rest + d, exact - load_stored<T>(to + d));
      }
    }
    for (; d < width; ++d) {
      const Stored rounded = Stored::rounded(x[d]);
      to[d * column] = rounded;
      rest[d * rest_column] = Stored::rounded(x[d] - static_cast<T>(rounded));
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
