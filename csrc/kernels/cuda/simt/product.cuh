#pragma once

#include "kernels/cuda/simt/tile.cuh"

// The two products of attention, each a block's: through two stages in shared memory, the next of
// which is fetched into registers while the products of the one before are summed.
//
//     pairs      C[own][other]   = sum over d        A[own][d] · B[other][d]
//                                  S = Q Kᵀ, dP = dO Vᵀ
//     columns    C[own][column] += sum over others   A[other][own] · B[other][column]
//                                  O = P V, dQ = dS K, ..
//
// Sums are taken in the order of their terms, whatever else is computed.

namespace qkv::kernels::simt {

/// Of terms that a stage holds.
template <class T>
constexpr int kDepth = 64 / static_cast<int>(sizeof(T));

/// Numbers that one row of `own` takes in shared memory.
template <int kOwn>
constexpr int kOwnStep = kSide* kOwn + kPad;

/// Numbers of the two stages, of the product that has more.
template <class T, int kOwn, int kColumns>
constexpr int kStageNumbers = 2 * kDepth<T>*(kOwnStep<kOwn> + kOthers > kSide * kColumns
                                                 ? kOwnStep<kOwn> + kOthers + kPad
                                                 : kSide * kColumns + kPad);

/// The column of a chunk of 16 · kColumns that a thread's number j is of: groups of 4 neighbours,
/// so that a quarter of a warp reads 128 bytes in one piece.
QKV_DEVICE int column_of_thread(int j) { return j / 4 * (4 * kSide) + thread_x() * 4 + j % 4; }

template <class T, int kColumns>
QKV_DEVICE void load_columns(const T* row, T (&to)[kColumns]) {
#pragma unroll
  for (int g = 0; g < kColumns; g += 4) {
    T four[4];
    device::load_shared<4>(row + column_of_thread(g), four);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[g + j] = four[j];
  }
}

/// A(own, d) and B(other, d) give the operands' numbers for d < depth.
template <int kOwn, class T, class A, class B>
QKV_DEVICE void multiply_pairs(const A& a, const B& b, int64_t depth, T* stages,
                               T (&c)[kOwn][kOthersOfThread]) {
  constexpr int kRows = kSide * kOwn, kStepA = kOwnStep<kOwn>, kStepB = kOthers + kPad;
  constexpr int kStage = kDepth<T> * (kStepA + kStepB);
  constexpr int kAtOnce = kThreads / kDepth<T>;  // rows of which the block fetches a stage's terms
  constexpr int kFetchA = (kRows + kAtOnce - 1) / kAtOnce, kFetchB = kOthers / kAtOnce;
  const int term = device::thread() % kDepth<T>, first = device::thread() / kDepth<T>;
  T next_a[kFetchA], next_b[kFetchB];

  const auto fetch = [&](int64_t d) {
    const bool inside = d + term < depth;
#pragma unroll
    for (int n = 0; n < kFetchA; ++n) {
      const int r = first + n * kAtOnce;
      next_a[n] = inside && r < kRows ? a(r, d + term) : T(0);
    }
#pragma unroll
    for (int n = 0; n < kFetchB; ++n) next_b[n] = inside ? b(first + n * kAtOnce, d + term) : T(0);
  };
  const auto store = [&](T* stage) {
#pragma unroll
    for (int n = 0; n < kFetchA; ++n) {
      const int r = first + n * kAtOnce;
      if (r < kRows) device::store_shared(stage + term * kStepA + r, next_a[n]);
    }
    stage += kDepth<T> * kStepA;
#pragma unroll
    for (int n = 0; n < kFetchB; ++n) {
      device::store_shared(stage + term * kStepB + first + n * kAtOnce, next_b[n]);
    }
  };

  set_to_zero(c);
  if (depth == 0) return;
  fetch(0);
  store(stages);
  device::barrier();
  for (int64_t d = 0, stage = 0; d < depth; d += kDepth<T>, stage ^= 1) {
    const bool more = d + kDepth<T> < depth;
    if (more) fetch(d + kDepth<T>);
    const T* own = stages + stage * kStage + thread_y() * kOwn;
    const T* other = stages + stage * kStage + kDepth<T> * kStepA + thread_x() * kOthersOfThread;
#pragma unroll 8
    for (int t = 0; t < kDepth<T>; ++t) {
      T x[kOwn], y[kOthersOfThread];
      device::load_shared<kOwn>(own + t * kStepA, x);
      device::load_shared<kOthersOfThread>(other + t * kStepB, y);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOthersOfThread; ++j) c[i][j] += x[i] * y[j];
      }
    }
    if (more) store(stages + (stage ^ 1) * kStage);
    device::barrier();
  }
}

/// A side of a product that a block has computed: [others][own], and which pairs are kept, a word
/// for each thread, bit 4 · i + j for its pair (i, j). (What is masked out is 0 in `numbers`.)
template <class T>
struct OwnTile {
  T* numbers;
  uint32_t* kept;
  bool partial;  // not all are kept
};

/// A thread's pairs to where multiply_columns reads them. No barrier.
template <class T, int kOwn>
QKV_DEVICE void store_pairs(const T (&x)[kOwn][kOthersOfThread], T* to) {
#pragma unroll
  for (int j = 0; j < kOthersOfThread; ++j) {
    T column[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) column[i] = x[i][j];
    device::store_shared<kOwn>(
        to + (thread_x() * kOthersOfThread + j) * kOwnStep<kOwn> + thread_y() * kOwn, column);
  }
}

/// B(other, column) gives numbers for other < others and column < columns. Where one of them is not
/// finite and the tile is partial, 0 · NaN must not reach sums that do not keep the pair.
template <int kOwn, int kColumns, class T, class B>
QKV_DEVICE void multiply_columns(const OwnTile<T>& a, const B& b, int others, int64_t first_column,
                                 int64_t columns, T* stages, T (&c)[kOwn][kColumns]) {
  constexpr int kWidth = kSide * kColumns, kStepA = kOwnStep<kOwn>, kStepB = kWidth + kPad;
  constexpr int kStage = kDepth<T> * kStepB;
  constexpr int kAtOnce = kThreads / kWidth, kFetch = kDepth<T> / kAtOnce;
  const int column = device::thread() % kWidth, first = device::thread() / kWidth;
  const bool has_column = first_column + column < columns;
  T next[kFetch];

  // Whether what this thread has fetched is finite.
  const auto fetch = [&](int n) {
    T check = T(0);
#pragma unroll
    for (int k = 0; k < kFetch; ++k) {
      const int other = n + first + k * kAtOnce;
      next[k] = has_column && other < others ? b(other, first_column + column) : T(0);
      check += next[k] - next[k];
    }
    return check == T(0);
  };
  const auto store = [&](T* stage) {
#pragma unroll
    for (int k = 0; k < kFetch; ++k) {
      device::store_shared(stage + (first + k * kAtOnce) * kStepB + column, next[k]);
    }
  };
  const auto arrive = [&](bool finite) {
    if (a.partial) return device::barrier_or(!finite);
    device::barrier();
    return false;
  };

  bool finite = fetch(0);
  store(stages);
  bool exact = arrive(finite);
  for (int n = 0, stage = 0; n < others; n += kDepth<T>, stage ^= 1) {
    const bool more = n + kDepth<T> < others;
    finite = more ? fetch(n + kDepth<T>) : true;
    const T* own = a.numbers + n * kStepA + thread_y() * kOwn;
    const T* row = stages + stage * kStage;
    if (!exact) {
#pragma unroll 8
      for (int t = 0; t < kDepth<T>; ++t) {
        T x[kOwn], y[kColumns];
        device::load_shared<kOwn>(own + t * kStepA, x);
        load_columns(row + t * kStepB, y);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) c[i][j] += x[i] * y[j];
        }
      }
    } else {
#pragma unroll 1
      for (int t = 0; t < kDepth<T>; ++t) {
        T x[kOwn], y[kColumns];
        device::load_shared<kOwn>(own + t * kStepA, x);
        load_columns(row + t * kStepB, y);
        const uint32_t kept = device::load_shared(a.kept + thread_y() * kSide + (n + t) / 4);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const bool keep = kept >> (4 * i + (n + t) % 4) & 1;
#pragma unroll
          for (int j = 0; j < kColumns; ++j) c[i][j] = keep ? c[i][j] + x[i] * y[j] : c[i][j];
        }
      }
    }
    if (more) store(stages + (stage ^ 1) * kStage);
    exact = arrive(finite);
  }
}

}  // namespace qkv::kernels::simt
