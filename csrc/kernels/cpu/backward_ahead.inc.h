#pragma once

#include "kernels/cpu/next_rows.inc.h"

// What a backward is about to touch for the first time, fetched while products are computed: what
// the next tile of rows reads, where this one's dQ goes, and keys that no tile has taken in yet,
// with their values and where the gradients of both are summed. Of weights: what came for them.

namespace qkv::kernels::QKV_ISA {

class BackwardAhead {
 public:
  /// While `tile` is worked on: `next` is the tile after it, nullptr if it is the last, and
  /// writes_query says whether dQ of `tile` is written after its last key.
  template <class T, int kRows>
  void begin_tile(const BackwardParams<T>& params, const RowTile<kRows>& tile,
                  const RowTile<kRows>* next, bool writes_query) {
    const Problem<T>& p = params.problem;
    const Storage storage = p.key_value_storage;
    for (auto& lines : of_tiles_) lines = {};
    if (next != nullptr) {
      of_tiles_[0] = lines_of_tile(*next, p.query, storage, p.head_dim);
      of_tiles_[1] = lines_of_tile(*next, params.grad_out, storage, p.value_dim);
      of_tiles_[2] = lines_of_tile(*next, params.out, storage, p.value_dim);
    }
    if (writes_query) of_tiles_[3] = lines_of_tile(tile, params.grad_query, storage, p.head_dim);
    calls_left_ = 0;
    for (const auto& lines : of_tiles_) need_calls(2 * lines.all());
  }

  /// While a block of keys is worked on: rows of K, V, dK and dV of keys after it.
  void begin_block(const NextRows (&of_keys)[4]) {
    for (int i = 0; i < 4; ++i) {
      of_keys_[i] = LinesAhead<NextRows>(of_keys[i]);
      need_calls(of_keys_[i].all());
    }
  }

  /// While weights of a tile are made: what came for those of the next keys.
  template <class T, int kRows>
  void begin_weights(const BackwardParams<T>& params, const RowTile<kRows>& tile, KeyRange keys) {
    of_weights_ = {};
    if (keys.empty()) return;
    of_weights_ = LinesAhead<NextRowsOfTile, 2>(
        next_rows_of_tile(tile, params.grad_weights, params.problem.key_value_storage,
                          keys.end - keys.begin, keys.begin));
  }

  /// With each key of a product, of one that makes weights too.
  template <bool kOfWeights = false>
  QKV_INLINE void fetch_next() {
    if constexpr (kOfWeights) {
      constexpr int kLines = 3;  // those of 96 keys in float32 are 6, and a tile has two pieces
      for (int i = 0; i < kLines; ++i) of_weights_.fetch_next();
    }
    if (calls_left_ == 0) return;  // else looking at each list takes 1 % of the time
    --calls_left_;
    const unsigned turn = turn_++ % 2;  // two of the four lists at a time
    of_tiles_[turn].fetch_next();
    of_tiles_[turn + 2].fetch_next();
    for (auto& lines : of_keys_) lines.fetch_next();
  }

 private:
  void need_calls(int64_t calls) {
    if (calls_left_ < calls) calls_left_ = calls;
  }

  LinesOfTile of_tiles_[4];  // Q, dO and O of the next tile, dQ of this one
  LinesAhead<NextRows> of_keys_[4];
  LinesAhead<NextRowsOfTile, 2> of_weights_;
  unsigned turn_ = 0;
  int64_t calls_left_ = 0;  // until all is fetched
};

}  // namespace qkv::kernels::QKV_ISA
