#pragma once

#include "kernels/cpu/backward_splits.inc.h"
#include "kernels/cpu/backward_tile.inc.h"

// The backward of weights W, for which dW came:
//
//     delta_i = sum over j of W_ij · dW_ij        dS_ij = W_ij · (dW_ij - delta_i)
//
// A row's delta needs all of its weights before the first dS is made. So W of all keys that a tile
// of rows sees is made first, and becomes dS where it lies, [keys][rows], until the tile's blocks
// of keys take that (attention_backward.inc.h). A unit of work that has all keys of a head has this
// in its scratch, for one tile after the other; units of some of its keys find it in memory, where
// a pass over all tiles left it.

namespace qkv::kernels::QKV_ISA {

/// Not with a softcap, whose derivative needs the scores again.
template <class T>
inline bool can_make_score_gradients(const Problem<T>& p) {
  return p.softcap == T(0);
}

/// Numbers of a tile of rows.
template <class T>
inline int64_t score_gradients_of_tile_size(const Problem<T>& p) {
  return can_make_score_gradients(p) ? p.keys * backward_vectors(p) * Simd<T>::kWidth : 0;
}

template <class T>
inline int64_t score_gradients_size(const Problem<T>& p) {
  return backward_row_tiles(p) * score_gradients_of_tile_size(p);
}

/// Whether a backward takes dS that is made before.
template <class T>
inline bool takes_score_gradients(const BackwardParams<T>& params) {
  return params.grad_weights.data != nullptr && can_make_score_gradients(params.problem);
}

/// Where dS of a tile is to stay, nullptr if that is nowhere. Tiles count those of all heads.
template <class T>
inline T* score_gradients_of_tile(const BackwardParams<T>& params, int64_t tile) {
  if (params.score_gradients_of_tiles == nullptr) return nullptr;
  return params.score_gradients_of_tiles + tile * score_gradients_of_tile_size(params.problem);
}

/// Of a unit of work: dW of a tile, and dS if that stays nowhere else.
template <class T>
inline int64_t own_score_gradients_size(const BackwardParams<T>& params) {
  if (!takes_score_gradients(params)) return 0;
  const int64_t tiles = params.score_gradients_of_tiles == nullptr ? 2 : 1;
  return tiles * score_gradients_of_tile_size(params.problem);
}

/// delta and dS of the tile whose rows `work` has loaded. dS goes to `stays` or, if that is
/// nullptr, to own_score_gradients_size numbers at `own`.
template <class Work, class T>
inline void make_score_gradients(Work& work, T* own, T* stays) {
  T* const grads = own;
  work.score_gradients = stays != nullptr ? stays : own + score_gradients_of_tile_size(work.p);
  const auto for_each_block_of_tile = [&](auto f) {
    for (int64_t split = 0; split < work.params.splits; ++split) {
      for_each_block(work.keys_of_rows().intersection(keys_of_split(work.params, split)),
                     work.keys_of_all_rows(), f);
    }
  };
  alignas(64) T dots[Work::kRows] = {};
  for_each_block_of_tile([&](int64_t n, int keys) { work.load_weights(n, keys, grads, dots); });
  for (int r = 0; r < work.tile.rows; ++r) {
    work.delta[r] = dots[r];
    work.params.minus_dots[work.tile.scalar(work.p, r)] = -dots[r];
  }
  for_each_block_of_tile([&](int64_t n, int keys) { work.weights_backward(n, keys, grads); });
}

template <class Scores, class T>
inline void score_gradients(const BackwardParams<T>& params, int64_t unit, void* scratch) {
  with_backward_vectors(params.problem, [&](auto vectors) {
    using Work = BackwardTile<Scores, vectors()>;
    Work work(params, static_cast<T*>(scratch), needs_whole_tile(params));
    const int64_t tiles = backward_row_tiles(work.p);
    work.tile = RowTile<Work::kRows>::of_head(work.p, unit / tiles, unit % tiles);
    work.load_rows();
    make_score_gradients(work, work.end_of_scratch, score_gradients_of_tile(params, unit));
  });
}

}  // namespace qkv::kernels::QKV_ISA
