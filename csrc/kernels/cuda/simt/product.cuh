#pragma once

#include "kernels/cuda/simt/tile.cuh"

// The two products of attention, each a block's:
//
//     pairs      C[own][other]   = sum over d        A[own][d] · B[other][d]
//                                  S = Q Kᵀ, dP = dO Vᵀ
//     columns    C[own][column] += sum over others   A[other][own] · B[other][column]
//                                  O = P V, dQ = dS K, ..
//
// Their terms come in stages: while those of one, in shared memory, are multiplied, the next is
// asked for from memory, and stored when they are done. The next may be another product's first:
//
//     memory          fetch(n + 1) ...................... store(n + 1) |
//     shared memory   ..... products of the terms of stage n ......... | barrier
//
// Sums are taken in the order of their terms, whatever else is computed.

namespace qkv::kernels::simt {

/// Terms of a stage.
template <class T>
constexpr int kDepth = 64 / static_cast<int>(sizeof(T));

/// Numbers that a thread fetches at once, and how many such pieces a stage has of a row's terms,
/// and of a column of its own.
template <class T>
constexpr int kStagePiece = 16 / static_cast<int>(sizeof(T));
constexpr int kPiecesOfRow = 4;
static_assert(kPiecesOfRow == kDepth<float> / kStagePiece<float>);
static_assert(kPiecesOfRow == kDepth<double> / kStagePiece<double>);

/// In shared memory 64 rows, of either side, lie one after the other for each term, so many numbers
/// apart; and so do a block's own pairs for each other.
constexpr int kSideStep = kOwns + kPad;
static_assert(kOwns == kOthers);

/// A gap in the middle of a stage: a warp stores 8 rows of 4 pieces at once, all in banks of their
/// own.
template <class T>
constexpr int kGap = 32 / static_cast<int>(sizeof(T));

/// Where a stage has a term of a side.
template <class T>
constexpr QKV_INLINE int term_offset(int t) {
  return t * kSideStep + t / (kDepth<T> / 2) * kGap<T>;
}

/// Numbers of a stage of a side; and of a stage of any product, of pairs with or without the own
/// side.
template <class T>
constexpr int kSideStage = kDepth<T>* kSideStep + kGap<T>;
template <class T, int kColumns>
constexpr QKV_INLINE int stage_numbers(bool own_stays) {
  const int of_pairs = own_stays ? kSideStage<T> : 2 * kSideStage<T>;
  const int of_columns = kDepth<T> * (kSide * kColumns + kPad);
  return of_pairs > of_columns ? of_pairs : of_columns;
}

/// Shared memory for the stage that is multiplied now, and for the one that is stored then.
template <class T>
struct Stages {
  T* now;
  T* then;

  static constexpr QKV_INLINE Stages in(SharedMemory& shared, int stage_numbers) {
    return {shared.take<T>(stage_numbers), shared.take<T>(stage_numbers)};
  }

  /// After a barrier.
  QKV_DEVICE void turn() {
    T* x = now;
    now = then;
    then = x;
  }
};

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

/// Pieces that a thread has of a stage on its way from memory to shared memory. All products that
/// follow each other share them: registers are scarce.
template <class Element, int kCount>
struct StagePieces {
  Piece<Element, kStagePiece<Real<Element>>> piece[kCount];
};

/// How many there are of a side of a product of pairs, and of a product of columns.
template <int kOwn>
constexpr int kPiecesOfSide = kOthers* kPiecesOfRow / kThreadsOfTile<kOwn>;
template <int kOwn, int kColumns>
constexpr int kPiecesOfColumns = kSide* kColumns* kPiecesOfRow / kThreadsOfTile<kOwn>;

/// Of a side of a product of pairs, which has its terms d < depth in rows of its own.
template <int kOwn, class Side>
class SideStage {
  using Element = typename Side::Stored;
  using T = Real<Element>;
  static constexpr int kPiece = kStagePiece<T>, kPieces = kPiecesOfSide<kOwn>;
  static constexpr int kRowsAtOnce = kOwns / kPieces;

 public:
  QKV_DEVICE SideStage(const Side& side, int64_t depth, Piece<Element, kStagePiece<T>>* pieces)
      : side_(side),
        depth_(depth),
        pieces_(pieces),
        in_pieces_(side.template lies_in_pieces<kPiece>(depth)) {}

  QKV_DEVICE int64_t depth() const { return depth_; }

  QKV_DEVICE void fetch(int64_t d) {
    if (in_pieces_) {
      fetch_terms<true>(d + piece() * kPiece);
    } else {
      fetch_terms<false>(d + piece() * kPiece);
    }
  }

  QKV_DEVICE void store(T* stage) const {
    T* to = stage + term_offset<T>(piece() * kPiece) + row();
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        device::store_shared(to + i * kSideStep + n * kRowsAtOnce, side_.scaled(pieces_[n][i]));
      }
    }
  }

 private:
  // Neighbours have the pieces of a row: so a warp reads whole sectors of few rows.
  static QKV_DEVICE int piece() { return device::thread() % kPiecesOfRow; }
  static QKV_DEVICE int row() { return device::thread() / kPiecesOfRow; }

  template <bool kInPieces>
  QKV_DEVICE void fetch_terms(int64_t d) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      pieces_[n] = fetch_piece<kInPieces, kPiece>(side_, row() + n * kRowsAtOnce, d, depth_);
    }
  }

  const Side& side_;
  int64_t depth_;
  Piece<Element, kStagePiece<T>>* pieces_;
  bool in_pieces_;
};

/// Of a product of pairs. The own side is staged too, unless it stays in shared memory, all of it,
/// as store_side() leaves it.
template <int kOwn, class A, class B>
class PairStage {
  using T = Real<typename A::Stored>;

 public:
  static constexpr int kPieces = 2 * kPiecesOfSide<kOwn>;

  template <int kCount>
  QKV_DEVICE PairStage(const A& a, const B& b, int64_t depth,
                       StagePieces<typename A::Stored, kCount>& pieces, const T* staying = nullptr)
      : own_(a, depth, pieces.piece + kPiecesOfSide<kOwn>),
        other_(b, depth, pieces.piece),
        staying_(staying) {
    static_assert(kCount >= kPieces);
  }

  QKV_DEVICE int64_t depth() const { return own_.depth(); }

  QKV_DEVICE void fetch(int64_t d) {
    if (staying_ == nullptr) own_.fetch(d);
    other_.fetch(d);
  }
  QKV_DEVICE void store(T* stage) const {
    if (staying_ == nullptr) own_.store(stage + kSideStage<T>);
    other_.store(stage);
  }

  /// Where the own side's terms d .. are, those of `stage`. It begins with the other's.
  QKV_DEVICE const T* own(const T* stage, int64_t d) const {
    return staying_ == nullptr ? stage + kSideStage<T> : staying_ + d / kDepth<T> * kSideStage<T>;
  }

 private:
  SideStage<kOwn, A> own_;
  SideStage<kOwn, B> other_;
  const T* staying_;
};

/// Stages of `depth` terms.
template <class T>
QKV_INLINE int64_t stages_of(int64_t depth) {
  return ceil_divide(depth, kDepth<T>);
}

/// All stages of a side, one after the other, to where it stays. A barrier must follow.
template <int kOwn, class Side, class T>
QKV_DEVICE void store_side(const Side& side, int64_t depth, T* to) {
  StagePieces<typename Side::Stored, kPiecesOfSide<kOwn>> pieces;
  SideStage<kOwn, Side> stage(side, depth, pieces.piece);
  for (int64_t d = 0; d < depth; d += kDepth<T>, to += kSideStage<T>) {
    stage.fetch(d);
    stage.store(to);
  }
}

/// Of a product of columns: B has `columns` of them, and rows for its first `others`.
template <int kOwn, int kColumns, class B>
class ColumnStage {
  using T = Real<typename B::Stored>;
  static constexpr int kWidth = kSide * kColumns, kPiece = kStagePiece<T>;
  static constexpr int kRowsAtOnce = kThreadsOfTile<kOwn> / (kWidth / kPiece);

 public:
  static constexpr int kStep = kWidth + kPad;
  static constexpr int kPieces = kPiecesOfColumns<kOwn, kColumns>;

  template <int kCount>
  QKV_DEVICE ColumnStage(const B& b, int others, int64_t first_column, int64_t columns,
                         StagePieces<typename B::Stored, kCount>& pieces)
      : b_(b),
        others_(others),
        first_column_(first_column),
        columns_(columns),
        pieces_(pieces.piece),
        in_pieces_(b.template lies_in_pieces<kPiece>(columns)) {
    static_assert(kCount >= kPieces);
  }

  QKV_DEVICE int others() const { return others_; }

  QKV_DEVICE void fetch(int n) {
    if (in_pieces_) {
      fetch_rows<true>(n + row());
    } else {
      fetch_rows<false>(n + row());
    }
  }

  /// Whether what this thread stores is finite.
  QKV_DEVICE bool store(T* stage) const {
    T check = T(0);
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      T numbers[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        numbers[i] = b_.scaled(pieces_[k][i]);
        check += numbers[i] - numbers[i];
      }
      device::store_shared(stage + (row() + k * kRowsAtOnce) * kStep + column(), numbers);
    }
    return check == T(0);
  }

 private:
  static QKV_DEVICE int row() { return device::thread() / (kWidth / kPiece); }
  static QKV_DEVICE int column() { return device::thread() % (kWidth / kPiece) * kPiece; }

  template <bool kInPieces>
  QKV_DEVICE void fetch_rows(int other) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k, other += kRowsAtOnce) {
      const int64_t columns = other < others_ ? columns_ : 0;
      pieces_[k] = fetch_piece<kInPieces, kPiece>(b_, other, first_column_ + column(), columns);
    }
  }

  const B& b_;
  int others_;
  int64_t first_column_;
  int64_t columns_;
  Piece<typename B::Stored, kPiece>* pieces_;
  bool in_pieces_;
};

/// c[i][j] += sum of x(t)[i] · y(t)[j] over a stage's terms t: load_x(t, x) and load_y(t, y) read
/// shared memory, a term ahead of what is multiplied.
template <class T, int kOwn, int kOther, class LoadX, class LoadY>
QKV_DEVICE void multiply_stage(const LoadX& load_x, const LoadY& load_y, T (&c)[kOwn][kOther]) {
  T x[2][kOwn], y[2][kOther];
  load_x(0, x[0]);
  load_y(0, y[0]);
#pragma unroll
  for (int t = 0; t < kDepth<T>; ++t) {
    if (t + 1 < kDepth<T>) {
      load_x(t + 1, x[(t + 1) % 2]);
      load_y(t + 1, y[(t + 1) % 2]);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOther; ++j) c[i][j] += x[t % 2][i] * y[t % 2][j];
    }
  }
}

/// c = the product whose stages `stage` fetches, and of which the first is stored. next_fetch()
/// and next_store(stage) are called for what comes after it. Without terms one stage of zeros.
template <class Stage, int kOwn, class T, class NextFetch, class NextStore>
QKV_DEVICE void multiply_staged_pairs(Stage& stage, Stages<T>& stages,
                                      T (&c)[kOwn][kOthersOfThread], const NextFetch& next_fetch,
                                      const NextStore& next_store) {
  set_to_zero(c);
  int64_t d = 0;
  do {
    const bool more = d + kDepth<T> < stage.depth();
    if (more) {
      stage.fetch(d + kDepth<T>);
    } else {
      next_fetch();
    }
    const T* own = stage.own(stages.now, d) + thread_y() * kOwn;
    const T* other = stages.now + thread_x() * kOthersOfThread;
    multiply_stage<T>(
        [&](int t, T(&x)[kOwn]) { device::load_shared<kOwn>(own + term_offset<T>(t), x); },
        [&](int t, T(&y)[kOthersOfThread]) {
          device::load_shared<kOthersOfThread>(other + term_offset<T>(t), y);
        },
        c);
    if (more) {
      stage.store(stages.then);
    } else {
      next_store(stages.then);
    }
    device::barrier();
    stages.turn();
    d += kDepth<T>;
  } while (d < stage.depth());
}

/// c = A · B, each with `depth` terms.
template <int kOwn, class T, class A, class B>
QKV_DEVICE void multiply_pairs(const A& a, const B& b, int64_t depth, Stages<T> stages,
                               T (&c)[kOwn][kOthersOfThread]) {
  if (depth == 0) return set_to_zero(c);
  StagePieces<typename A::Stored, PairStage<kOwn, A, B>::kPieces> pieces;
  PairStage<kOwn, A, B> stage(a, b, depth, pieces);
  stage.fetch(0);
  stage.store(stages.now);
  device::barrier();
  multiply_staged_pairs(
      stage, stages, c, [] {}, [](T*) {});
}

/// A side of a product that a block has computed: [others][own], and which pairs are kept, a word
/// for each thread, bit 4 · i + j for its pair (i, j). (What is masked out is 0 in `numbers`.)
template <class T>
struct OwnTile {
  T* numbers;
  uint32_t* kept;
  bool partial;  // not all are kept

  /// A barrier. Whether a thread has stored what is not finite, if the tile is partial: 0 · NaN
  /// must not reach sums that do not keep the pair.
  QKV_DEVICE bool barrier_or_not_finite(bool finite) const {
    if (partial) return device::barrier_or(!finite);
    device::barrier();
    return false;
  }
};

/// A thread's pairs to where products of columns read them. No barrier.
template <class T, int kOwn>
QKV_DEVICE void store_pairs(const T (&x)[kOwn][kOthersOfThread], T* to) {
#pragma unroll
  for (int j = 0; j < kOthersOfThread; ++j) {
    T column[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) column[i] = x[i][j];
    device::store_shared<kOwn>(
        to + (thread_x() * kOthersOfThread + j) * kSideStep + thread_y() * kOwn, column);
  }
}

/// c += the product whose stages `stage` fetches, as multiply_staged_pairs. exact: what
/// barrier_or_not_finite() says of its first stage.
template <int kOwn, int kColumns, class T, class B, class NextFetch, class NextStore>
QKV_DEVICE void multiply_staged_columns(const OwnTile<T>& a, ColumnStage<kOwn, kColumns, B>& stage,
                                        bool exact, Stages<T>& stages, T (&c)[kOwn][kColumns],
                                        const NextFetch& next_fetch, const NextStore& next_store) {
  using Stage = ColumnStage<kOwn, kColumns, B>;
  for (int n = 0; n < stage.others(); n += kDepth<T>) {
    const bool more = n + kDepth<T> < stage.others();
    if (more) {
      stage.fetch(n + kDepth<T>);
    } else {
      next_fetch();
    }
    const T* own = a.numbers + n * kSideStep + thread_y() * kOwn;
    if (!exact) {
      multiply_stage<T>(
          [&](int t, T(&x)[kOwn]) { device::load_shared<kOwn>(own + t * kSideStep, x); },
          [&](int t, T(&y)[kColumns]) { load_columns(stages.now + t * Stage::kStep, y); }, c);
    } else {
#pragma unroll 1
      for (int t = 0; t < kDepth<T>; ++t) {
        T x[kOwn], y[kColumns];
        device::load_shared<kOwn>(own + t * kSideStep, x);
        load_columns(stages.now + t * Stage::kStep, y);
        const uint32_t kept = device::load_shared(a.kept + thread_y() * kSide + (n + t) / 4);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const bool keep = kept >> (4 * i + (n + t) % 4) & 1;
#pragma unroll
          for (int j = 0; j < kColumns; ++j) c[i][j] = keep ? c[i][j] + x[i] * y[j] : c[i][j];
        }
      }
    }
    if (more) {
      exact = a.barrier_or_not_finite(stage.store(stages.then));
    } else {
      next_store(stages.then);
      device::barrier();
    }
    stages.turn();
  }
}

/// c += A · B. B has rows for its first `others` and `columns` columns.
template <int kOwn, int kColumns, class T, class B>
QKV_DEVICE void multiply_columns(const OwnTile<T>& a, const B& b, int others, int64_t first_column,
                                 int64_t columns, Stages<T> stages, T (&c)[kOwn][kColumns]) {
  StagePieces<typename B::Stored, kPiecesOfColumns<kOwn, kColumns>> pieces;
  ColumnStage<kOwn, kColumns, B> stage(b, others, first_column, columns, pieces);
  stage.fetch(0);
  const bool exact = a.barrier_or_not_finite(stage.store(stages.now));
  multiply_staged_columns(
      a, stage, exact, stages, c, [] {}, [](T*) {});
}

}  // namespace qkv::kernels::simt
