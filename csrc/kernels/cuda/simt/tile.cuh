#pragma once

#include "kernels/band.h"
#include "kernels/cuda/simt/math.cuh"
#include "kernels/half.h"
#include "kernels/params.h"

// What the kernels for any NVIDIA GPU, without tensor cores, have in common. A block computes tiles
// of 64 x 64 pairs (own, other), where "own" are the rows (or the keys) that it computes results
// for, and "others" the keys (or rows) that it walks over. Its threads are 16 columns of 16, each
// with 4 x 4 pairs, or of 8, each with 8 x 4:
//
//                      others ->  0..3  4..7   ..  60..63          thread (y, x) holds the pairs
//     own 0 .. kOwn - 1           y = 0                                own    y · kOwn ..
//         kOwn ..                 y = 1                                others x · 4 ..
//          :                        :    x = 0   1   ..  15
//
// so that the threads of a row of the tile are 16 neighbours in a warp: sums and maxima of rows are
// shuffles.

namespace qkv::kernels::simt {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / device::kWarp;
constexpr int kSide = 16;
constexpr int kOwns = 64;
constexpr int kOthers = 64;
constexpr int kOthersOfThread = kOthers / kSide;
static_assert(kOthersOfThread == 4, "pair 4 · i + j of a thread, here and there");

// Numbers after each row in shared memory, so that stores of columns spread over its banks.
constexpr int kPad = 4;

/// Threads of a block of which each has kOwn of the own side of a tile.
template <int kOwn>
constexpr int kThreadsOfTile = kSide* kOwns / kOwn;

/// Own rows or keys of each thread where its registers hold no more: with four tiles of pairs, or
/// two and two wide results.
constexpr int kLeastOwn = 4;
static_assert(kThreadsOfTile<kLeastOwn> == kThreads);

/// As many as they hold elsewhere: 8 of float, 4 of double.
template <class T>
constexpr int kMostOwn = 32 / static_cast<int>(sizeof(T));

QKV_DEVICE int thread_x() { return device::thread() % kSide; }
QKV_DEVICE int thread_y() { return device::thread() / kSide; }

QKV_INLINE int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The first `most` of what is left.
QKV_INLINE int at_most(int most, int64_t left) {
  return left < most ? static_cast<int>(left) : most;
}

/// The nearest to x of 0 .. most.
QKV_INLINE int within(int most, int64_t x) { return x < 0 ? 0 : at_most(most, x); }

/// Results of `columns` columns are computed by so many blocks, each of `width` of them; by one if
/// there are none, as rows have more results than columns.
QKV_INLINE int64_t column_chunks(int64_t columns, int64_t width) {
  return columns <= width ? 1 : ceil_divide(columns, width);
}

/// The numbers that elements are computed in.
template <class Element>
struct RealOf {
  using type = float;
};
template <>
struct RealOf<double> {
  using type = double;
};
template <class Element>
using Real = typename RealOf<Element>::type;

/// Blocks that should share a multiprocessor: two if a thread's tiles, of so many numbers, leave
/// room in 128 registers, or in 255 if threads are half as many, so that one computes while the
/// other waits.
template <class T, int kOwn = kLeastOwn>
constexpr int blocks_at_once(int numbers) {
  return sizeof(T) == 4 && numbers <= 64 * kOwn / kLeastOwn ? 2 : 1;
}

template <class T, int kRows, int kColumns>
QKV_DEVICE void set_to_zero(T (&x)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x[i][j] = T(0);
  }
}

// What is added up over many tiles errs by their number and their size, not by the product of both,
// if it is summed over groups of tiles first: the others 0 .. 511, 512 .. 1023, and so on, wherever
// a unit begins, so that the bits of a row do not depend on those beside it.
constexpr int kOthersOfGroup = 8 * kOthers;

/// Where the group of `other` ends, if there are no more than `count` others.
QKV_INLINE int64_t end_of_group(int64_t other, int64_t count) {
  const int64_t end = (other / kOthersOfGroup + 1) * kOthersOfGroup;
  return end < count ? end : count;
}

/// Adds the sums of a group to those of all and starts over. What is volatile stays in local
/// memory, and registers are left to what every product adds to.
template <class T, class Total, int kCount>
QKV_DEVICE void end_group(T (&sum)[kCount], volatile Total (&total)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    total[i] = total[i] + sum[i];
    sum[i] = T(0);
  }
}
template <class T, class Total, int kRows, int kColumns>
QKV_DEVICE void end_group(T (&sum)[kRows][kColumns], volatile Total (&total)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) end_group(sum[i], total[i]);
}

QKV_DEVICE float rounded(float x, const float*) { return x; }
QKV_DEVICE double rounded(double x, const double*) { return x; }
QKV_DEVICE BFloat16 rounded(float x, const BFloat16*) { return BFloat16::rounded(x); }
QKV_DEVICE Float16 rounded(float x, const Float16*) { return Float16::rounded(x); }

template <class Element>
QKV_DEVICE Real<Element> load_number(const Element* from) {
  return static_cast<Real<Element>>(device::load_global(from));
}
template <class Element>
QKV_DEVICE void store_number(Element* to, Real<Element> x) {
  device::store_global(to, rounded(x, to));
}

/// Stores what rounding to an Element takes from x, rounded to one in turn.
template <class Element>
QKV_DEVICE void store_rest(Element* to, Real<Element> x) {
  store_number(to, x - static_cast<Real<Element>>(rounded(x, to)));
}

/// Hands out a block's shared memory. In constant expressions it only adds up how much that is, and
/// all pointers are null.
class SharedMemory {
 public:
  explicit constexpr QKV_INLINE SharedMemory(char* memory) : memory_(memory), taken_(0) {}

  template <class T>
  constexpr QKV_INLINE T* take(int count) {
    T* pointer =
        __builtin_is_constant_evaluated() ? nullptr : reinterpret_cast<T*>(memory_ + taken_);
    taken_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return pointer;
  }

  constexpr QKV_INLINE int64_t taken() const { return taken_; }

 private:
  char* memory_;
  int64_t taken_;
};

/// How far an operand's batch element is from its beginning. The first dimension, often the only
/// one, takes no division.
template <class T>
QKV_DEVICE int64_t batch_offset(const Problem<T>& p, int64_t batch, const int64_t* strides) {
  int64_t offset = 0;
  for (int d = p.batch_rank - 1; d > 0; --d) {
    offset += batch % p.batch_size[d] * strides[d];
    batch /= p.batch_size[d];
  }
  return p.batch_rank == 0 ? 0 : offset + batch * strides[0];
}

/// A batch element of an operand. Its numbers are stored as Elements, whatever its type says.
template <class Element, class T>
QKV_DEVICE Element* batch_of(const Problem<T>& p, const Operand<T>& x, int64_t batch) {
  return reinterpret_cast<Element*>(x.data) + batch_offset(p, batch, x.batch_stride);
}
template <class Element, class T>
QKV_DEVICE const Element* batch_of(const Problem<T>& p, const Operand<const T>& x, int64_t batch) {
  return reinterpret_cast<const Element*>(x.data) + batch_offset(p, batch, x.batch_stride);
}

/// What a head of a batch element has one of.
template <class T>
QKV_DEVICE T number_of_head(const Problem<T>& p, const HeadNumbers<T>& x, int64_t batch,
                            int64_t head) {
  return device::load_global(x.data + batch_offset(p, batch, x.batch_stride) +
                             head * x.head_stride);
}

/// Rows of several query heads, interleaved, so that K and V are read once for all heads that share
/// them (as in kernels/cpu/row_tile.inc.h):
///
///     packed row   0    1    2    3    4    5   ..        (a group of 3)
///     query        0    0    0    1    1    1
///     head         h0  h0+1 h0+2  h0  h0+1 h0+2
struct PackedRows {
  int64_t first_head;
  int64_t group;
  int64_t count;

  /// Without a division if it can be, and in 32 bits if they hold it: of 64 it takes long.
  QKV_INLINE int64_t query(int64_t row) const {
    if (group == 1) return row;
    if (row >> 32 == 0) return static_cast<uint32_t>(row) / static_cast<uint32_t>(group);
    return row / group;
  }
  QKV_INLINE int64_t head(int64_t row) const { return first_head + row - query(row) * group; }

  /// The keys that some of the rows first .. first + rows see, by the band, and those that all see.
  template <class T>
  QKV_DEVICE KeyRange keys_of_any(const Problem<T>& p, int64_t first, int rows) const {
    return simt::keys_of_any(p.band, query(first), query(first + rows - 1), p.keys);
  }
  template <class T>
  QKV_DEVICE KeyRange keys_of_all(const Problem<T>& p, int64_t first, int rows) const {
    return simt::keys_of_all(p.band, query(first), query(first + rows - 1), p.keys);
  }
};

/// All rows that see a key/value head, and how many these are.
template <class T>
QKV_INLINE PackedRows rows_of_kv_head(const Problem<T>& p, int64_t kv_head) {
  const int64_t group = p.query_heads / p.kv_heads;
  return {kv_head * group, group, group * p.queries};
}
template <class T>
QKV_INLINE int64_t rows_of_kv_head(const Problem<T>& p) {
  return rows_of_kv_head(p, 0).count;
}

/// Where the rows of a tile lie in an operand's batch element, in shared memory; -1: there is no
/// row.
struct RowOffsets {
  int64_t* of_row;
  int64_t head_stride;
  int64_t row_stride;
};

/// A few packed rows, in shared memory.
struct RowTile {
  int64_t* query;
  int32_t* head;  // -1: there is no such row
  int64_t* begin;
  int64_t* end;  // keys begin <= j < end are seen, by the band

  template <int kRows>
  static constexpr QKV_INLINE RowTile in(SharedMemory& shared) {
    return {shared.take<int64_t>(kRows), shared.take<int32_t>(kRows), shared.take<int64_t>(kRows),
            shared.take<int64_t>(kRows)};
  }

  /// A barrier must follow.
  template <int kRows, class T, class... Offsets>
  QKV_DEVICE void load(const Problem<T>& p, const PackedRows& rows, int64_t first,
                       const Offsets&... offsets) const {
    static_assert(kRows <= kThreadsOfTile<kMostOwn<float>>, "a row for each thread");
    if (const int r = device::thread(); r < kRows) {
      const bool exists = first + r < rows.count;
      const int64_t i = exists ? rows.query(first + r) : 0, h = exists ? rows.head(first + r) : -1;
      const KeyRange keys = exists ? keys_of_query(p.band, i, p.keys) : KeyRange{0, 0};
      device::store_shared(query + r, i);
      device::store_shared(head + r, static_cast<int32_t>(h));
      device::store_shared(begin + r, keys.begin);
      device::store_shared(end + r, keys.end);
      (device::store_shared(offsets.of_row + r,
                            exists ? h * offsets.head_stride + i * offsets.row_stride : -1),
       ...);
    }
  }

  QKV_DEVICE bool exists(int r) const { return device::load_shared(head + r) >= 0; }

  /// Where row r has its scalar in a dense (B, Hq, M).
  template <class T>
  QKV_DEVICE int64_t scalar(const Problem<T>& p, int64_t batch, int r) const {
    return (batch * p.query_heads + device::load_shared(head + r)) * p.queries +
           device::load_shared(query + r);
  }

  template <class Element, class T>
  QKV_DEVICE Element* row(Element* batch_element, const Operand<T>& x, int r) const {
    return batch_element + device::load_shared(head + r) * x.head_stride +
           device::load_shared(query + r) * x.row_stride;
  }
};

/// kCount numbers as they lie in memory, one after the other. Words, for what memory is asked for
/// is waited for where it is taken apart.
template <class Element, int kCount>
struct Piece {
  static constexpr int kBytes = kCount * sizeof(Element), kWords = kBytes / 4;
  static constexpr int kAlignment = kBytes < 16 ? kBytes : 16;

  uint32_t words[kWords];

  QKV_DEVICE Real<Element> operator[](int i) const {
    Element x;
    if constexpr (sizeof(Element) == 2) {
      x = Element{static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)};
    } else {
      memcpy(&x, words + i * (kWords / kCount), sizeof(x));
    }
    return static_cast<Real<Element>>(x);
  }

  /// All at once; 0 if there are none.
  QKV_DEVICE void load(const Element* from, bool exist) {
    *this = {};
    if (exist) device::load_global(reinterpret_cast<const uint32_t*>(from), words);
  }

  /// One after the other: number(i), an Element.
  template <class Number>
  QKV_DEVICE void gather(const Number& number) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Element x = number(i);
      if constexpr (sizeof(Element) == 2) {
        words[i / 2] = i % 2 == 0 ? x.bits : words[i / 2] | static_cast<uint32_t>(x.bits) << 16;
      } else {
        memcpy(words + i * (kWords / kCount), &x, sizeof(x));
      }
    }
  }
};

/// Where a number of an operand is, if there is one.
template <class Element>
struct Place {
  const Element* at;
  bool exists;

  QKV_DEVICE Element load() const { return exists ? device::load_global(at) : Element{}; }
};

/// Whether rows of so many columns, this far apart, may be read in pieces.
template <class Element, int kCount>
QKV_DEVICE bool lie_in_pieces(const Element* first_row, int64_t row_stride, int64_t columns) {
  return columns % kCount == 0 && row_stride % kCount == 0 &&
         reinterpret_cast<uintptr_t>(first_row) % Piece<Element, kCount>::kAlignment == 0;
}

/// Rows of query or grad_out as one side of a product; 0 where there is no row.
template <class Element>
struct TileRows {
  using Stored = Element;

  const Element* batch_element;
  RowOffsets offsets;
  Real<Element> factor;

  template <class T>
  static QKV_DEVICE TileRows of(const Problem<T>& p, const Operand<const T>& x, int64_t batch,
                                T factor, int64_t* offsets) {
    return {batch_of<Element>(p, x, batch), {offsets, x.head_stride, x.row_stride}, factor};
  }

  /// A number that exists.
  QKV_DEVICE const Element* first() const { return batch_element; }

  /// Of a number without the factor.
  QKV_DEVICE Place<Element> place(int r, int64_t column) const {
    const int64_t offset = device::load_shared(offsets.of_row + r);
    return {batch_element + offset + column, offset >= 0};
  }

  QKV_DEVICE Real<Element> scaled(Real<Element> x) const { return factor * x; }

  QKV_DEVICE Real<Element> operator()(int r, int64_t column) const {
    return scaled(static_cast<Real<Element>>(place(r, column).load()));
  }

  template <int kCount>
  QKV_DEVICE bool lies_in_pieces(int64_t columns) const {
    return offsets.head_stride % kCount == 0 &&
           lie_in_pieces<Element, kCount>(batch_element, offsets.row_stride, columns);
  }
};

/// Keys of a head, first_key and `count` - 1 after it, of key or value as one side of a product; 0
/// after them.
template <class Element>
struct TileKeys {
  using Stored = Element;

  const Element* first_key;
  int64_t row_stride;
  int count;

  /// Of a head, to take tiles of: found before a loop, as a batch element takes divisions to find.
  template <class T>
  static QKV_DEVICE TileKeys of_head(const Problem<T>& p, const Operand<const T>& x, int64_t batch,
                                     int64_t kv_head) {
    return {batch_of<Element>(p, x, batch) + kv_head * x.head_stride, x.row_stride, 0};
  }

  QKV_DEVICE TileKeys tile(int64_t first, int keys) const {
    return {first_key + first * row_stride, row_stride, keys};
  }

  /// A number that exists.
  QKV_DEVICE const Element* first() const { return first_key; }

  QKV_DEVICE Place<Element> place(int k, int64_t column) const {
    return {first_key + k * row_stride + column, k < count};
  }

  QKV_DEVICE Real<Element> scaled(Real<Element> x) const { return x; }

  template <int kCount>
  QKV_DEVICE bool lies_in_pieces(int64_t columns) const {
    return lie_in_pieces<Element, kCount>(first_key, row_stride, columns);
  }
};

/// Columns `column` and those after it of a row of one side of a product that has `columns`; 0
/// where there is none. kInPieces: lies_in_pieces() says so of the side.
template <bool kInPieces, int kCount, class Side>
QKV_DEVICE Piece<typename Side::Stored, kCount> fetch_piece(const Side& side, int row,
                                                            int64_t column, int64_t columns) {
  Piece<typename Side::Stored, kCount> piece;
  if constexpr (kInPieces) {
    const auto first = side.place(row, column);
    piece.load(first.at, column < columns && first.exists);
  } else {
    piece.gather([&](int i) {
      auto number = side.place(row, column + i);
      number.exists = number.exists && column + i < columns;
      return number.load();
    });
  }
  return piece;
}

}  // namespace qkv::kernels::simt
