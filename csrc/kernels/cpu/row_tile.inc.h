#pragma once

#include "kernels/cpu/transpose.inc.h"
#include "kernels/params.h"

// A tile is a few query rows that share one key/value head. With grouped queries (G query heads a
// key/value head) it takes its rows from all of them, interleaved, so that K and V are read once a
// group and neighbouring rows see nearly the same keys:
//
//     packed row   0    1    2    3    4    5   ..  G·M - 1        (G = 3)
//     query        0    0    0    1    1    1
//     head         h0  h0+1 h0+2  h0  h0+1 h0+2
//
// Rows lie in the lanes of vectors: a tile of 48 rows is 3 vectors of 16 floats. Where a head's
// vectors do not fill its tiles, the first one has fewer: under a causal mask those are the rows
// that see the fewest keys, and kernels go through tiles of few vectors at less of their speed.

namespace qkv::kernels::QKV_ISA {

/// Position of a batch element in the batch dimensions of a problem.
struct BatchIndex {
  int rank;
  int64_t index[kMaxBatchRank];

  int64_t offset(const int64_t* strides) const {
    int64_t sum = 0;
    for (int d = 0; d < rank; ++d) sum += index[d] * strides[d];
    return sum;
  }
};

template <class T>
inline BatchIndex batch_index(const Problem<T>& problem, int64_t batch) {
  BatchIndex b;
  b.rank = problem.batch_rank;
  for (int d = b.rank - 1; d >= 0; --d) {
    b.index[d] = batch % problem.batch_size[d];
    batch /= problem.batch_size[d];
  }
  return b;
}

/// Rows of a key/value head, those of all query heads that share it.
template <class T>
inline int64_t rows_of_kv_head(const Problem<T>& problem) {
  return problem.query_heads / problem.kv_heads * problem.queries;
}

template <int kRows>
struct RowTile {
  BatchIndex batch;
  int64_t batch_number;
  int64_t kv_head;
  int rows;  // <= kRows; the lanes after them hold zeros
  int64_t query[kRows];
  int64_t head[kRows];

  int64_t first_query() const { return query[0]; }
  int64_t last_query() const { return query[rows - 1]; }

  /// Tiles that the rows of a key/value head are cut into.
  template <class T>
  static int64_t count_of_head(const Problem<T>& problem) {
    return (rows_of_kv_head(problem) + kRows - 1) / kRows;
  }

  /// The first row of tile t, which ends where the next one would begin, or with the last row.
  template <class T>
  static int64_t first_row_of(const Problem<T>& problem, int64_t t) {
    if (t == 0) return 0;
    constexpr int64_t kLanes = kRows < Simd<T>::kWidth ? kRows : Simd<T>::kWidth;
    const int64_t whole_vectors = (rows_of_kv_head(problem) + kLanes - 1) / kLanes * kLanes;
    return whole_vectors - (count_of_head(problem) - t) * kRows;
  }

  /// Tile t of key/value head `head`, of those of all batch elements.
  template <class T>
  static RowTile of_head(const Problem<T>& problem, int64_t head, int64_t t) {
    const int64_t kv_head = head % problem.kv_heads;
    const int64_t group = problem.query_heads / problem.kv_heads;
    const int64_t first = first_row_of(problem, t), end = first_row_of(problem, t + 1);
    return make(problem, head / problem.kv_heads, kv_head, kv_head * group, group, first,
                static_cast<int>(end - first));
  }

  /// Packed rows first_row .., at most `most`, of the query heads first_head .. first_head + group.
  template <class T>
  static RowTile make(const Problem<T>& problem, int64_t batch, int64_t kv_head, int64_t first_head,
                      int64_t group, int64_t first_row, int most = kRows) {
    RowTile tile;
    tile.batch = batch_index(problem, batch);
    tile.batch_number = batch;
    tile.kv_head = kv_head;
    const int64_t left = group * problem.queries - first_row;
    tile.rows = left < most ? static_cast<int>(left) : most;
    int64_t query = first_row / group, of_group = first_row % group;
    for (int r = 0; r < tile.rows; ++r) {
      tile.query[r] = query;
      tile.head[r] = first_head + of_group;
      if (++of_group < group) continue;
      of_group = 0;
      ++query;
    }
    return tile;
  }

  /// Its rows from `first` on, at most kMost.
  template <int kMost>
  RowTile<kMost> part(int first) const {
    RowTile<kMost> tile;
    tile.batch = batch;
    tile.batch_number = batch_number;
    tile.kv_head = kv_head;
    tile.rows = rows - first < kMost ? rows - first : kMost;
    for (int r = 0; r < tile.rows; ++r) {
      tile.query[r] = query[first + r];
      tile.head[r] = head[first + r];
    }
    return tile;
  }

  /// Where a tensor has the rows of the tile. What they share is worked out once: in a loop that
  /// stores vectors, which may be anywhere, the compiler would work it out for each row.
  template <class Number>
  struct RowPointers {
    const RowTile& tile;
    Number* of_batch;
    int64_t head_stride, row_stride;

    Number* operator[](int r) const {
      return of_batch + tile.head[r] * head_stride + tile.query[r] * row_stride;
    }
  };
  template <class T>
  RowPointers<T> rows_in(const Operand<T>& x) const {
    return {*this, x.data + batch.offset(x.batch_stride), x.head_stride, x.row_stride};
  }

  template <class T>
  T* row(const Operand<T>& x, int r) const {
    return rows_in(x)[r];
  }

  template <class T>
  T* keys_of_head(const Operand<T>& x) const {
    return x.data + batch.offset(x.batch_stride) + kv_head * x.head_stride;
  }

  /// The same where x.data points to numbers stored in 16 bits.
  template <class Stored, class T>
  RowPointers<const Stored> stored_rows_in(const Operand<const T>& x) const {
    return {*this, reinterpret_cast<const Stored*>(x.data) + batch.offset(x.batch_stride),
            x.head_stride, x.row_stride};
  }
  template <class Stored, class T>
  RowPointers<Stored> stored_rows_in(const Operand<T>& x) const {
    return {*this, reinterpret_cast<Stored*>(x.data) + batch.offset(x.batch_stride), x.head_stride,
            x.row_stride};
  }
  template <class Stored, class T>
  auto* stored_row(const Operand<T>& x, int r) const {
    return stored_rows_in<Stored>(x)[r];
  }
  template <class Stored, class T>
  const Stored* stored_keys_of_head(const Operand<const T>& x) const {
    return reinterpret_cast<const Stored*>(x.data) + batch.offset(x.batch_stride) +
           kv_head * x.head_stride;
  }

  template <class Stored, class T>
  Stored* stored_keys_of_head(const Operand<T>& x) const {
    return reinterpret_cast<Stored*>(x.data) + batch.offset(x.batch_stride) +
           kv_head * x.head_stride;
  }

  template <class T>
  T number_of_head(const HeadNumbers<T>& x, int r) const {
    return x.data[batch.offset(x.batch_stride) + head[r] * x.head_stride];
  }

  /// Where row r has its scalar in a dense (B, Hq, M).
  template <class T>
  int64_t scalar(const Problem<T>& problem, int r) const {
    return (batch_number * problem.query_heads + head[r]) * problem.queries + query[r];
  }

  /// to[d][r] = scale · x[r][d], 0 for the lanes without a row, of the first `lanes`, whole
  /// vectors.
  template <class T>
  QKV_ONE_COPY void pack_transposed(const Operand<const T>& x, int64_t width, T scale, T* to,
                                    Storage storage = Storage::kSame, int lanes = kRows) const {
    constexpr int kWidth = Simd<T>::kWidth;
    with_stored<T>(storage, [&](auto stored) {
      using Stored = decltype(stored);
      const auto rows_of_x = stored_rows_in<Stored>(x);
      for (int r = 0; r < lanes; r += kWidth) {
        if (r >= rows) {
          for (int64_t d = 0; d < width; ++d) {
            Simd<T>::store(to + d * kRows + r, Simd<T>::zero());
          }
          continue;
        }
        const Stored* from[kWidth];
        for (int l = 0; l < kWidth; ++l) {
          from[l] = r + l < rows ? rows_of_x[r + l] : nullptr;
        }
        transpose_rows<T, Stored>(from, width, scale, to + r, kRows);
      }
    });
  }

  /// to[r][d] = scale · x[r][d], 0 for the lanes without a row and for the columns after width. A
  /// row of `to` is a whole number of vectors.
  template <class T>
  QKV_ONE_COPY void pack(const Operand<const T>& x, int64_t width, T scale, T* to, int64_t to_row,
                         Storage storage = Storage::kSame) const {
    using S = Simd<T>;
    with_stored<T>(storage, [&](auto stored) {
      const auto rows_of_x = stored_rows_in<decltype(stored)>(x);
      for (int r = 0; r < kRows; ++r) {
        const auto* from = r < rows ? rows_of_x[r] : nullptr;
        T* line = to + r * to_row;
        const int64_t columns = from != nullptr ? width : 0;
        int64_t d = 0;
        for (; d + S::kWidth <= columns; d += S::kWidth) {
          S::store(line + d, S::set(scale) * load_stored<T>(from + d));
        }
        if (d < columns) {
          S::store(line + d, S::set(scale) * load_first<T>(from + d, columns - d));
          d += S::kWidth;
        }
        for (; d < to_row; d += S::kWidth) S::store(line + d, S::zero());
      }
    });
  }

  /// x[r][d] = scale[r] · from[d][r]
  template <class T>
  QKV_ONE_COPY void unpack_transposed(const T* from, int64_t width, const T* scale,
                                      const Operand<T>& x, Storage storage = Storage::kSame) const {
    constexpr int kWidth = Simd<T>::kWidth;
    with_stored<T>(storage, [&](auto stored) {
      using Stored = decltype(stored);
      const auto rows_of_x = stored_rows_in<Stored>(x);
      for (int r = 0; r < rows; r += kWidth) {
        Stored* to[kWidth];
        for (int l = 0; l < kWidth; ++l) {
          to[l] = r + l < rows ? rows_of_x[r + l] : nullptr;
        }
        transpose_columns<T, Stored>(from + r, kRows, width, Simd<T>::load(scale + r), to);
      }
    });
  }
};

}  // namespace qkv::kernels::QKV_ISA
