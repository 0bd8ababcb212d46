#pragma once

#include "kernels/band.h"
#include "kernels/cpu/dropout_tile.inc.h"
#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/mask_tile.inc.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/merge.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/score_tile.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/online_softmax.h"

// Forward attention for one tile of query rows (FlashAttention-2, arXiv:2307.08691, algorithm 1).
//
//     out = dropout(softmax(softcap(scale · Q Kᵀ) + mask - ALiBi)) V
//     lse = log of the sum that the softmax divides by, a sink included
//
// Everything is kept transposed: the rows of the tile lie in the lanes of vectors, so that maxima
// and sums over keys are vertical, and K and V are used as they lie in memory.
//
//              rows (lanes) ->                         for each block of kBlockKeys keys:
//     Qᵀ   D  [ ................ ]  scale folded in
//                                                       S = K · Qᵀ              [keys][rows]
//     S  keys [ ................ ]  one block           softcap, mask, ALiBi    in place
//                                                       P = exp(S - max)        in place
//     Oᵀ  Dv  [ ................ ]                      dropout                 in place
//                                                       Oᵀ += Vᵀ · P            [Dv][rows]

namespace qkv::kernels::QKV_ISA {

constexpr int kForwardVectors = 3;  // of rows in a tile
constexpr int kForwardBlockKeys = 128;
constexpr int64_t kKeysOfForwardSplit = 1024;  // at least
constexpr int64_t kMaxForwardSplits = 16;

template <class T>
constexpr int kForwardRows = kForwardVectors* Simd<T>::kWidth;

template <class T>
inline int64_t forward_tiles_per_head(const Problem<T>& problem) {
  return (rows_of_kv_head(problem) + kForwardRows<T> - 1) / kForwardRows<T>;
}

/// Ranges that the keys of a tile are cut into: several if the rows of a head fill one tile at
/// most.
template <class T>
inline int64_t forward_splits(const Problem<T>& problem) {
  if (rows_of_kv_head(problem) > kForwardRows<T>) return 1;
  const int64_t splits = problem.keys / kKeysOfForwardSplit;
  return splits < 1 ? 1 : splits > kMaxForwardSplits ? kMaxForwardSplits : splits;
}

template <class T>
inline KeyRange keys_of_forward_split(const Problem<T>& problem, int64_t split) {
  const int64_t splits = forward_splits(problem);
  const int64_t blocks = (problem.keys + kForwardBlockKeys - 1) / kForwardBlockKeys;
  const int64_t end = blocks * (split + 1) / splits * kForwardBlockKeys;
  return {blocks * split / splits * kForwardBlockKeys, end < problem.keys ? end : problem.keys};
}

/// Whether the kernel for this problem reads key and value in 16 bits.
template <class T>
inline bool forward_reads_16_bits(const Problem<T>& problem) {
  return sizeof(T) == 4 && rows_of_kv_head(problem) <= kFewRows<T>;
}

/// One unit of work is one range of keys for one tile.
template <class T>
inline int64_t forward_units(const ForwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  return p.batch * p.kv_heads * forward_tiles_per_head(p) * forward_splits(p);
}

/// How many numbers ForwardParams::partial has; 0 if it is not needed.
template <class T>
inline int64_t forward_partial_size(const ForwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  if (forward_splits(p) == 1) return 0;
  return forward_units(params) * rows_of_kv_head(p) * partial_row(p);
}

template <class T>
inline int64_t forward_scratch_bytes(const ForwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  const int64_t numbers = (p.head_dim + p.value_dim + 2 * kForwardBlockKeys) * kForwardRows<T>;
  return numbers * static_cast<int64_t>(sizeof(T)) + 2 * kForwardBlockKeys / 8 * kForwardRows<T>;
}

template <class T, int kVectors>
inline void forward_tile(const ForwardParams<T>& params, int64_t batch, int64_t kv_head,
                         int64_t first_row, KeyRange split, T* partial, T* scratch) {
  using S = Simd<T>;
  using Math = VectorMath<T>;
  using Number = typename S::Number;
  constexpr int kRows = kVectors * S::kWidth;
  const Problem<T>& p = params.problem;
  const int64_t group = p.query_heads / p.kv_heads;
  const auto tile = RowTile<kRows>::make(p, batch, kv_head, kv_head * group, group, first_row);

  T* query_t = scratch;
  T* out_t = query_t + p.head_dim * kRows;
  T* scores = out_t + p.value_dim * kRows;
  T* bias = scores + kForwardBlockKeys * kRows;
  MaskTile<T, kRows> mask{reinterpret_cast<uint8_t*>(bias + kForwardBlockKeys * kRows), bias};
  uint8_t* stays = mask.bits + kForwardBlockKeys / 8 * kRows;
  AlibiTile<T, kVectors> alibi;

  tile.pack_transposed(p.query, p.head_dim, p.scale, query_t);
  alibi.load(p, tile);
  for (int64_t x = 0; x < p.value_dim * kRows; x += S::kWidth) S::store(out_t + x, S::zero());
  OnlineSoftmax<Math> softmax[kVectors];
  for (auto& s : softmax) s.clear();

  const T* keys = tile.keys_of_head(p.key);
  const T* values = tile.keys_of_head(p.value);
  const KeyRange range =
      keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys).intersection(split);
  const bool changes_scores =
      p.softcap != T(0) || mask.has_bias(p) || p.alibi_slopes.data != nullptr;
  for (int64_t n = first_of_eight(range.begin); n < range.end; n += kForwardBlockKeys) {
    const int block =
        range.end - n < kForwardBlockKeys ? static_cast<int>(range.end - n) : kForwardBlockKeys;
    const TileState state = mask.load(p, tile, n, block);
    if (state == TileState::kEmpty) continue;

    // S = K · Qᵀ, and the block's maximum of each row.
    Number block_max[kVectors];
    for (auto& m : block_max) m = Math::minus_infinity();
    multiply<T, kVectors>(
        block, p.head_dim, keys + n * p.key.row_stride, p.key.row_stride, UnitStride{}, query_t,
        kRows, [&](int64_t k, int v, Number x) __attribute__((always_inline)) {
          S::store(scores + k * kRows + v * S::kWidth, x);
          block_max[v] = S::maximum(block_max[v], x);
        });
    if (changes_scores) modify_scores<T, kVectors>(p, mask, alibi, n, block, scores);
    if (changes_scores || state == TileState::kPartial) {
      keep_scores<T, kVectors>(mask.bits, state, block, scores, block_max);
    }

    // P = exp(S - max); what was summed under a smaller maximum shrinks first.
    bool grows = false;
    for (int v = 0; v < kVectors; ++v) grows |= S::any_greater(block_max[v], softmax[v].max);
    if (grows) {
      Number correction[kVectors];
      for (int v = 0; v < kVectors; ++v) correction[v] = softmax[v].raise_max(block_max[v]);
      for (int64_t d = 0; d < p.value_dim; ++d) {
        for (int v = 0; v < kVectors; ++v) {
          T* o = out_t + d * kRows + v * S::kWidth;
          S::store(o, S::load(o) * correction[v]);
        }
      }
    }
    Number shift[kVectors];
    for (int v = 0; v < kVectors; ++v) shift[v] = softmax[v].shift();
    for (int k = 0; k < block; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        T* s = scores + k * kRows + v * S::kWidth;
        S::store(s, softmax[v].weight(S::load(s), shift[v]));
      }
    }

    if (p.dropout.threshold != 0) {
      load_dropout<kRows>(p.dropout, tile, n, block, stays);
      drop<T, kVectors>(stays, block, scores);
    }

    // Oᵀ += Vᵀ · P
    const T* block_values = values + n * p.value.row_stride;
    if (state == TileState::kPartial &&
        !all_finite<T>(block_values, p.value.row_stride, block, p.value_dim)) {
      multiply_add_kept_keys<T, kVectors>(block, p.value_dim, block_values, p.value.row_stride,
                                          scores, mask.bits, out_t);
    } else {
      multiply_add<T, kVectors>(p.value_dim, block, block_values, UnitStride{}, p.value.row_stride,
                                scores, kRows, out_t, kRows);
    }
  }

  alignas(64) T normaliser[kRows], max[kRows], sum[kRows];
  for (int v = 0; v < kVectors; ++v) {
    S::store(normaliser + v * S::kWidth, softmax[v].normaliser());
    S::store(max + v * S::kWidth, softmax[v].max);
    S::store(sum + v * S::kWidth, softmax[v].sum);
  }
  if (partial != nullptr) {
    for (int r = 0; r < tile.rows; ++r) {
      T* to = partial + r * partial_row(p);
      for (int64_t d = 0; d < p.value_dim; ++d) to[d] = out_t[d * kRows + r];
      to[p.value_dim] = max[r];
      to[p.value_dim + 1] = sum[r];
    }
    return;
  }
  const T dropout = dropout_scale<T>(p.dropout);
  for (int r = 0; r < tile.rows; ++r) {
    if (p.sinks.data != nullptr) {
      normaliser[r] = add_sink(tile.number_of_head(p.sinks, r), max[r], sum[r]);
    }
    normaliser[r] *= dropout;
    const int64_t scalar = tile.scalar(p, r);
    log_of_sum(max[r], sum[r], params.lse[scalar], params.lse_rest[scalar]);
  }
  tile.unpack_transposed(out_t, p.value_dim, normaliser, params.out);
}

/// A tile with no more vectors than the rows from first_row on fill.
template <class T>
inline void forward_rows(const ForwardParams<T>& params, int64_t batch, int64_t kv_head,
                         int64_t first_row, KeyRange keys, T* partial, T* scratch) {
  const int64_t rows = rows_of_kv_head(params.problem) - first_row;
  if (rows <= Simd<T>::kWidth) {
    forward_tile<T, 1>(params, batch, kv_head, first_row, keys, partial, scratch);
  } else if (rows <= 2 * Simd<T>::kWidth) {
    forward_tile<T, 2>(params, batch, kv_head, first_row, keys, partial, scratch);
  } else {
    forward_tile<T, kForwardVectors>(params, batch, kv_head, first_row, keys, partial, scratch);
  }
}

/// The keys of one split, of rows that fill one tile at most.
template <class T>
inline void forward_of_split(const ForwardParams<T>& params, int64_t batch, int64_t kv_head,
                             int64_t split, T* partial, T* scratch) {
  const Problem<T>& p = params.problem;
  const int64_t rows = rows_of_kv_head(p);
  const KeyRange keys = keys_of_forward_split(p, split);
  if (rows <= kFewRows<T>) {
    const int64_t group = p.query_heads / p.kv_heads;
    const auto tile = RowTile<Simd<T>::kWidth>::make(p, batch, kv_head, kv_head * group, group, 0);
    T* result = partial != nullptr ? partial : scratch;
    T* rest = partial != nullptr ? scratch : scratch + rows * partial_row(p);
    switch (p.key_value_storage) {
      case Storage::kSame:
        few_rows<T, T>(params, tile, keys, result, rest);
        break;
      case Storage::kBFloat16:
        if constexpr (sizeof(T) == 4) few_rows<T, BFloat16>(params, tile, keys, result, rest);
        break;
      case Storage::kFloat16:
        if constexpr (sizeof(T) == 4) few_rows<T, Float16>(params, tile, keys, result, rest);
        break;
    }
    if (partial == nullptr) merge(params, tile, 1, result);
  } else {
    forward_rows(params, batch, kv_head, 0, keys, partial, scratch);
  }
}

/// Tiles of a head run from the last to the first: under a causal mask the last ones have most
/// keys, and starting with them leaves small pieces to even out the threads.
template <class T>
inline void attention_forward(const ForwardParams<T>& params, int64_t unit, void* scratch) {
  const Problem<T>& p = params.problem;
  T* numbers = static_cast<T*>(scratch);
  const int64_t tiles = forward_tiles_per_head(p);
  if (tiles > 1) {
    const int64_t head = unit / tiles;
    const int64_t first_row = (tiles - 1 - unit % tiles) * kForwardRows<T>;
    forward_rows<T>(params, head / p.kv_heads, head % p.kv_heads, first_row, {0, p.keys}, nullptr,
                    numbers);
    return;
  }
  const int64_t splits = forward_splits(p);
  const int64_t head = unit / splits;
  T* partial = splits == 1 ? nullptr : params.partial + unit * rows_of_kv_head(p) * partial_row(p);
  forward_of_split(params, head / p.kv_heads, head % p.kv_heads, unit % splits, partial, numbers);
}

/// After all units, if there is a partial: one unit is one key/value head.
template <class T>
inline void merge_forward(const ForwardParams<T>& params, int64_t head) {
  const Problem<T>& p = params.problem;
  const int64_t splits = forward_splits(p);
  const int64_t group = p.query_heads / p.kv_heads, kv_head = head % p.kv_heads;
  const auto tile =
      RowTile<kForwardRows<T>>::make(p, head / p.kv_heads, kv_head, kv_head * group, group, 0);
  merge(params, tile, splits, params.partial + head * splits * rows_of_kv_head(p) * partial_row(p));
}

}  // namespace qkv::kernels::QKV_ISA
