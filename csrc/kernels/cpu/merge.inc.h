#pragma once

#include "kernels/band.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/output_rows.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/logsumexp.h"

// With few query rows there is little to share out but the keys. They are then cut into ranges
// ("splits", by the sizes of the problem alone) that are worked on independently, as in
// Flash-Decoding (Dao et al., 2023); each leaves for each of its rows
//
//     [ out (Dv), not normalised | max | sum ]
//
// and these are merged in order: the same bits on any number of threads.

namespace qkv::kernels::QKV_ISA {

constexpr int64_t kMaxForwardSplits = 16;

/// The row of a partial result.
template <class T>
inline int64_t partial_row(const Problem<T>& problem) {
  return problem.value_dim + 2;
}

/// Output and logsumexp of a tile's rows. Its first row is `partial` of the first split; all rows
/// of the head lie between those of two splits.
template <class T, int kRows>
inline void merge(const ForwardParams<T>& params, const RowTile<kRows>& tile, int64_t splits,
                  const T* partial) {
  constexpr int kColumns = 64;  // at once
  const Problem<T>& p = params.problem;
  const OutputRows<T, kRows> output(params, tile);
  const T minus_infinity = -static_cast<T>(__builtin_inff());
  const int64_t step = rows_of_kv_head(p) * partial_row(p);
  alignas(64) T maxima[kRows], sums[kRows];
  bool has_keys[kRows];
  for (int r = 0; r < kRows; ++r) maxima[r] = sums[r] = T(1);  // of a lane without a row
  for (int r = 0; r < tile.rows; ++r) {
    const T* parts = partial + r * partial_row(p);
    T max = minus_infinity, sum = T(0);
    for (int64_t s = 0; s < splits; ++s) {
      const T max_s = parts[s * step + p.value_dim];
      if (max_s > max) max = max_s;
    }
    // The out of a range whose maximum is -inf is 0, or NaN if a value that a row kept is.
    T factor[kMaxForwardSplits];
    for (int64_t s = 0; s < splits; ++s) {
      const T max_s = parts[s * step + p.value_dim];
      factor[s] = max_s == minus_infinity ? T(0) : max_s == max ? T(1) : natural_exp(max_s - max);
      sum += factor[s] * parts[s * step + p.value_dim + 1];
    }
    has_keys[r] = sum != T(0);
    T normaliser = has_keys[r] ? T(1) / sum : T(0);
    if (p.sinks.data != nullptr) normaliser = add_sink(tile.number_of_head(p.sinks, r), max, sum);
    normaliser *= dropout_scale<T>(p.dropout);
    const int64_t columns = params.out.data != nullptr ? p.value_dim : 0;
    for (int64_t first = 0; first < columns; first += kColumns) {
      const int64_t left = columns - first;
      const int64_t width = left < kColumns ? left : kColumns;
      T out[kColumns] = {};
      for (int64_t s = 0; s < splits; ++s) {
        const T* part = parts + s * step + first;
        for (int64_t d = 0; d < width; ++d) out[d] += factor[s] * part[d];
      }
      for (int64_t d = 0; d < width; ++d) out[d] *= normaliser;
      output.write(r, first, width, out);
    }
    maxima[r] = max;
    sums[r] = sum;
  }
  write_logsumexp(params, tile, maxima, sums, has_keys);
}

}  // namespace qkv::kernels::QKV_ISA
