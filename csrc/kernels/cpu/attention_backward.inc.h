#pragma once

#include "kernels/cpu/backward_tile.inc.h"
#include "kernels/cpu/gradient_products.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/key_sums.inc.h"
#include "kernels/cpu/mask_gradient.inc.h"

// Backward attention (FlashAttention-2, arXiv:2307.08691, algorithm 2), five products a tile:
//
//     S = scale · K Qᵀ    dP = V dOᵀ    (to P and dS: backward_tile.inc.h)
//     dV += P dO          dK += scale · dS Q            dQ += scale · dSᵀ K
//                                       (gradient_products.inc.h)
//
// One unit of work is a range of keys ("split") of one key/value head: it owns dK and dV of its
// keys and walks over all rows that see them. With several splits (their number is a function of
// N alone) each leaves its part of dQ in a buffer of its own; sum_grad_query adds them in
// order. So there are five products, no atomics, and the same bits on any number of threads.

namespace qkv::kernels::QKV_ISA {

template <class T>
inline int64_t backward_blocks(const Problem<T>& problem) {
  return (problem.keys + kBackwardBlockKeys - 1) / kBackwardBlockKeys;
}

/// Splits are cut as evenly as whole blocks allow.
template <class T>
inline KeyRange keys_of_split(const BackwardParams<T>& params, int64_t split) {
  const int64_t blocks = backward_blocks(params.problem);
  const int64_t begin = blocks * split / params.splits * kBackwardBlockKeys;
  const int64_t end = blocks * (split + 1) / params.splits * kBackwardBlockKeys;
  return {begin, end < params.problem.keys ? end : params.problem.keys};
}

/// Vectors of rows in a tile: a function of the number of rows alone.
template <class T>
inline int backward_vectors(const Problem<T>& problem) {
  const int64_t vectors = round_up_to_vector<T>(rows_of_kv_head(problem)) / Simd<T>::kWidth;
  return vectors <= 3 ? static_cast<int>(vectors) : kBackwardVectors;
}

template <class T>
inline int64_t backward_row_tiles(const Problem<T>& problem) {
  const int64_t rows_of_tile = backward_vectors(problem) * Simd<T>::kWidth;
  return (rows_of_kv_head(problem) + rows_of_tile - 1) / rows_of_tile;
}

/// How many numbers partial_grad_query takes for one key/value head: [split][row tile][D][rows].
template <class T>
inline int64_t partial_grad_query_size(const BackwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  return params.splits * backward_row_tiles(p) * p.head_dim * backward_vectors(p) * Simd<T>::kWidth;
}

template <class Scores, class T>
inline int64_t backward_scratch_bytes(const BackwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  const int64_t widths = round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim);
  const int64_t longest_split =
      (backward_blocks(p) + params.splits - 1) / params.splits * kBackwardBlockKeys;
  using Tile = BackwardTile<Scores, kBackwardVectors>;
  const int64_t numbers =
      Tile::scratch_numbers(p) + GradientProducts<Scores, kBackwardVectors>::scratch_numbers(p) +
      p.head_dim * Tile::kRows + widths * longest_split + Tile::numbers_of_copies(p, longest_split);
  return numbers * static_cast<int64_t>(sizeof(T));
}

template <class Scores, int kVectors, class T>
inline void backward_split(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                           void* scratch) {
  using Work = BackwardTile<Scores, kVectors>;
  using Gradients = GradientProducts<Scores, kVectors>;
  using S = Simd<T>;
  constexpr int kRows = Work::kRows;
  const Problem<T>& p = params.problem;
  const int64_t head = first_head + unit / params.splits;
  const int64_t split = unit % params.splits;
  const int64_t tiles = backward_row_tiles(p);
  const KeyRange keys = keys_of_split(params, split);
  const int64_t key_width = round_up_to_vector<T>(p.head_dim);
  const int64_t value_width = round_up_to_vector<T>(p.value_dim);
  const bool need_query = params.grad_query.data != nullptr;
  const bool need_key = params.grad_key.data != nullptr;
  const bool need_value = params.grad_value.data != nullptr;

  const bool whole = p.softcap != T(0) || params.slope_gradient_of_rows != nullptr ||
                     params.grad_mask.data != nullptr;
  Work work(params, static_cast<T*>(scratch), whole);
  T* own_grad_query_t = work.end_of_scratch + Gradients::scratch_numbers(p);  // [D][rows]
  T* own_key_sums = own_grad_query_t + p.head_dim * kRows;  // [keys of the split][D]
  T* own_value_sums = own_key_sums + (keys.end - keys.begin) * key_width;
  T* copies_of_keys = own_value_sums + (keys.end - keys.begin) * value_width;
  KeySums<T> key_sums(p, head, keys, p.head_dim, p.scale, params.grad_key, own_key_sums);
  KeySums<T> value_sums(p, head, keys, p.value_dim, T(1), params.grad_value, own_value_sums);
  Gradients gradients(work, need_key ? &key_sums : nullptr, need_value ? &value_sums : nullptr,
                      work.end_of_scratch);
  T scale_of_row[kRows];
  for (auto& s : scale_of_row) s = p.scale;
  alignas(64) T slope_gradient[kRows];

  for (int64_t t = 0; t < tiles; ++t) {
    work.tile = RowTile<kRows>::of_head(p, head, t);
    const RowTile<kRows>& tile = work.tile;
    T* grad_query_t = params.splits == 1
                          ? own_grad_query_t
                          : params.partial_grad_query + (unit * tiles + t) * p.head_dim * kRows;
    bool has_grad_query = false;

    if (t == 0) work.load_keys(keys, copies_of_keys);

    const KeyRange range = work.keys_of_rows().intersection(keys);
    if (!range.empty()) {
      work.load_rows();
      gradients.load_rows();
    }

    set_to_zero(slope_gradient, kRows);
    for (int64_t n = first_of_eight(range.begin); n < range.end; n += kBackwardBlockKeys) {
      const int block =
          range.end - n < kBackwardBlockKeys ? static_cast<int>(range.end - n) : kBackwardBlockKeys;
      const TileState state = work.load_block(n, block);
      if (state == TileState::kEmpty) continue;
      const bool partial = state == TileState::kPartial;
      if (params.grad_mask.data != nullptr) {
        add_to_mask(work.ds_tile, tile, params.grad_mask, n, block);
      }
      if (params.slope_gradient_of_rows != nullptr) {
        work.add_slope_gradient(n, block, slope_gradient);
      }
      if (p.softcap != T(0)) work.through_softcap(state, block);

      gradients.add_to_keys(n, block, partial);
      if (!need_query) continue;
      // Vectors without a row are read where splits are summed, and nowhere else.
      const bool writes_all = !partial && (params.splits == 1 || tile.rows > kRows - S::kWidth);
      if (!has_grad_query && !writes_all) {
        set_to_zero(grad_query_t, p.head_dim * kRows);
        has_grad_query = true;
      }
      gradients.add_to_rows(block, partial, Sums<T>{grad_query_t, kRows, has_grad_query});
      has_grad_query = true;
    }
    if (need_query && !has_grad_query) set_to_zero(grad_query_t, p.head_dim * kRows);
    if (params.slope_gradient_of_rows != nullptr) {
      T* of_rows = params.slope_gradient_of_rows + split * p.batch * p.query_heads * p.queries;
      for (int r = 0; r < tile.rows; ++r) of_rows[tile.scalar(p, r)] = slope_gradient[r];
    }
    if (need_query && params.splits == 1) {
      tile.unpack_transposed(grad_query_t, p.head_dim, scale_of_row, params.grad_query,
                             p.key_value_storage);
    }
  }

  if (need_key) key_sums.write();
  if (need_value) value_sums.write();
}

/// sum = dQᵀ of tile `t` of a head, `size` numbers: the parts of all splits, added in order. Heads
/// count from where partial_grad_query begins.
template <class T>
inline void add_splits(const BackwardParams<T>& params, int64_t head, int64_t tiles, int64_t t,
                       int64_t size, T* sum) {
  using S = Simd<T>;
  for (int64_t split = 0; split < params.splits; ++split) {
    const T* part = params.partial_grad_query + ((head * params.splits + split) * tiles + t) * size;
    for (int64_t x = 0; x < size; x += S::kWidth) {
      const auto so_far = split == 0 ? S::zero() : S::load(sum + x);
      S::store(sum + x, so_far + S::load(part + x));
    }
  }
}

/// dQ of one tile of rows, of which each split left dQᵀ in `size` numbers.
template <class T, int kVectors>
inline void sum_splits(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                       int64_t size, void* scratch) {
  constexpr int kRows = kVectors * Simd<T>::kWidth;
  const Problem<T>& p = params.problem;
  const int64_t tiles = backward_row_tiles(p);
  const int64_t head = unit / tiles, t = unit % tiles;
  const auto tile = RowTile<kRows>::of_head(p, first_head + head, t);

  T* sum = static_cast<T*>(scratch);
  add_splits(params, head, tiles, t, size, sum);
  T scale_of_row[kRows];
  for (auto& s : scale_of_row) s = p.scale;
  tile.unpack_transposed(sum, p.head_dim, scale_of_row, params.grad_query, p.key_value_storage);
}

/// Calls f with the number of vectors in a tile of this problem.
template <class T, class F>
inline void with_backward_vectors(const Problem<T>& problem, F f) {
  switch (backward_vectors(problem)) {
    case 1:
      return f(Constant<1>{});
    case 2:
      return f(Constant<2>{});
    case 3:
      return f(Constant<3>{});
    default:
      return f(Constant<kBackwardVectors>{});
  }
}

/// One split of one key/value head. Units count the splits of first_head, then of the next head;
/// partial_grad_query begins with first_head.
template <class Scores, class T>
inline void attention_backward(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                               void* scratch) {
  with_backward_vectors(params.problem, [&](auto vectors) {
    backward_split<Scores, vectors()>(params, first_head, unit, scratch);
  });
}

/// One tile of rows of one key/value head. Units count the row tiles of first_head, then of the
/// next head.
template <class T>
inline void sum_grad_query(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                           void* scratch) {
  with_backward_vectors(params.problem, [&](auto vectors) {
    const int64_t size = params.problem.head_dim * vectors() * Simd<T>::kWidth;
    sum_splits<T, vectors()>(params, first_head, unit, size, scratch);
  });
}

/// Scores says how S and dP are multiplied (score_products.inc.h).
template <class Scores, class T = typename Scores::Number>
constexpr BackwardKernels<T> make_backward_kernels() {
  return {backward_row_tiles<T>,      backward_scratch_bytes<Scores, T>,
          partial_grad_query_size<T>, attention_backward<Scores, T>,
          sum_grad_query<T>,          mask_gradient_scratch_bytes<Scores, T>,
          mask_gradient<Scores, T>};
}

}  // namespace qkv::kernels::QKV_ISA
