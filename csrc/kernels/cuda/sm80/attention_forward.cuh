#pragma once

#include "kernels/cuda/simt/forward_result.cuh"
#include "kernels/cuda/simt/unit.cuh"
#include "kernels/cuda/sm80/pair_line.cuh"
#include "kernels/cuda/sm80/result.cuh"
#include "kernels/online_softmax.h"

// Forward attention of 16-bit types with tensor cores (FlashAttention-2, arXiv:2307.08691,
// algorithm 1).
//
//     out = dropout(softmax(softcap(scale · Q Kᵀ) + mask - ALiBi)) V
//     lse = log of the sum that the softmax divides by, a sink included
//
// A block owns 64 · kRowTiles packed rows of one key/value head, kWidth columns of the output and
// one range of the keys; a warp 16 · kRowTiles rows, all of it in registers:
//
//     for 64 keys at a time:   S   [rows][64]      sums of a product, of which the softmax makes
//                              P   [rows][64]      the left side of the next, rounded as multiplied
//                              O   [rows][columns]
//
// O is divided by the sum of the rounded weights, so that it stays a convex combination of values;
// lse comes from those that are not rounded.
//
// While S is multiplied V is on its way to shared memory, and while P V is the next K.

namespace qkv::kernels::sm80 {

/// Steps of a product of queries that stay in registers.
constexpr int kStayingSteps = 4;

template <class Element, int kRowTiles, int kWidth>
struct ForwardShared {
  static constexpr int kRows = 4 * kRowTiles * kRowsOfProduct;
  static constexpr int kLines = 2 * kRowTiles;  // of pairs, for each lane
  static constexpr int kValueStep = row_step(kWidth);

  SharedMemory memory;
  int step;
  Element* query = memory.take<Element>(kRows * step);
  Element* keys = memory.take<Element>(kKeys * step);
  Element* values = memory.take<Element>(kKeys * kValueStep);
  RowTile rows = RowTile::in<kRows>(memory);
  int64_t* query_offsets = memory.take<int64_t>(kRows);

  constexpr QKV_INLINE ForwardShared(char* begin, int64_t head_dim)
      : memory(begin), step(row_step(head_dim)) {}
};

/// What OnlineSoftmax computes weights with that are rounded to 16 bits.
struct WeightMath : ScalarMath<float> {
  static QKV_DEVICE float exp(float x) { return device::approximate_exp(x); }
};
using Softmax = OnlineSoftmax<WeightMath>;

/// s: scale · <q, k>, -inf where the pair is not kept, if that is for the band and the ends of rows
/// and keys alone.
template <int kRowTiles>
QKV_DEVICE void cut_pairs(const RowTile& tile, int first_row, int64_t first_key, int keys,
                          Pairs<kRowTiles>& s, uint32_t (&kept)[kRowTiles]) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    kept[t] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first_row + t * kRowsOfProduct + row_of_number(2 * half);
      const int begin = within(kKeys, device::load_shared(tile.begin + r) - first_key);
      const int end = within(keys, device::load_shared(tile.end + r) - first_key);
#pragma unroll
      for (int n = 0; n < kTilesOfOthers; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int k = n * 8 + column_of_number(i);
          const bool keep = k >= begin && k < end;
          s[t][n][i] = keep ? s[t][n][i] : -infinity<float>();
          kept[t] |= static_cast<uint32_t>(keep) << bit_of_number(n, i);
        }
      }
    }
  }
}

/// Lines of pairs from scale · <q, k> to scores, -inf where a pair is not kept. Their rows are 8
/// apart from first_row on, in a block's Shared memory.
template <class Shared>
QKV_DEVICE_ASIDE void modify_lines(const Problem<float>& p, int64_t batch, int first_row,
                                   int64_t first_key, int keys, float (*lines)[kPairsOfLine],
                                   uint32_t* kept, uint32_t* stays) {
  const RowTile tile = Shared(device::shared_memory(), p.head_dim).rows;
  const Scores<float> scores(p, batch);
#pragma unroll 1
  for (int line = 0; line < Shared::kLines; ++line) {
    const PairLine<false> pairs(scores, tile, first_row + line * 8 + row_of_number(0), first_key,
                                keys);
    float x[kPairsOfLine], cap[kPairsOfLine];
#pragma unroll
    for (int j = 0; j < kPairsOfLine; ++j) x[j] = lines[line][j];
    const uint32_t kept_here = pairs.modify(x, cap);
#pragma unroll
    for (int j = 0; j < kPairsOfLine; ++j) {
      lines[line][j] = kept_here >> j & 1 ? x[j] : -infinity<float>();
    }
    kept[line] = kept_here;
    stays[line] = scores.drops() ? pairs.stays() : 0xffff;
  }
}

/// s: scale · <q, k> -> scores, -inf where the pair is not kept; stays: weights that dropout
/// leaves.
template <class Shared, int kRowTiles>
QKV_DEVICE void modify_pairs(const Problem<float>& p, int64_t batch, int first_row,
                             int64_t first_key, int keys, Pairs<kRowTiles>& s,
                             uint32_t (&kept)[kRowTiles], uint32_t (&stays)[kRowTiles]) {
  constexpr int kLines = Shared::kLines;
  float lines[kLines][kPairsOfLine];
  uint32_t kept_of_line[kLines], stays_of_line[kLines];
#pragma unroll
  for (int i = 0; i < kLines * kPairsOfLine; ++i) {
    const int line = i / kPairsOfLine, j = i % kPairsOfLine;
    lines[line][j] = s[line / 2][product_of_pair(j)][number_of_pair(line % 2, j)];
  }
  modify_lines<Shared>(p, batch, first_row, first_key, keys, lines, kept_of_line, stays_of_line);
#pragma unroll
  for (int i = 0; i < kLines * kPairsOfLine; ++i) {
    const int line = i / kPairsOfLine, j = i % kPairsOfLine;
    s[line / 2][product_of_pair(j)][number_of_pair(line % 2, j)] = lines[line][j];
  }
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    kept[t] = kept_of_line[2 * t] | kept_of_line[2 * t + 1] << kPairsOfLine;
    stays[t] = stays_of_line[2 * t] | stays_of_line[2 * t + 1] << kPairsOfLine;
  }
}

/// s: scores -> weights, rounded to an Element, 0 where dropout takes them, of which the sums of
/// the softmax and of the rounded weights know nothing. The group's sums so far, rounded_sum and
/// out, follow its maxima.
template <class Element, int kRowTiles, int kWidth>
QKV_DEVICE void weigh_scores(bool drops, const uint32_t (&stays)[kRowTiles], Pairs<kRowTiles>& s,
                             Softmax (&softmax)[kRowTiles][2], float (&rounded_sum)[kRowTiles][2],
                             Sums<kRowTiles, kWidth>& out) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    float max[2], correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = -infinity<float>();
#pragma unroll
      for (int n = 0; n < kTilesOfOthers; ++n) {
        max[half] = maximum(max[half], maximum(s[t][n][2 * half], s[t][n][2 * half + 1]));
      }
    }
#pragma unroll
    for (int bits = 1; bits < 4; bits *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[half] = maximum(max[half], device::shuffle_xor(max[half], bits));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      correction[half] = softmax[t][half].raise_max(max[half]);
      rounded_sum[t][half] *= correction[half];
    }
    // Once rows have met their larger scores, most tiles leave all of a warp's maxima as they are.
    if (device::ballot(correction[0] != 1.0f || correction[1] != 1.0f) != 0) {
#pragma unroll
      for (int c = 0; c < kWidth / 8; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][c][i] *= correction[i / 2];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = softmax[t][half].shift();
#pragma unroll
      for (int n = 0; n < kTilesOfOthers; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const float weight = softmax[t][half].weight(s[t][n][i], shift);
          s[t][n][i] = static_cast<float>(rounded(weight, static_cast<const Element*>(nullptr)));
          rounded_sum[t][half] += s[t][n][i];
        }
      }
    }
    if (!drops) continue;
#pragma unroll
    for (int n = 0; n < kTilesOfOthers; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[t][n][i] = stays[t] >> bit_of_number(n, i) & 1 ? s[t][n][i] : 0.0f;
    }
  }
}

template <class Element, int kRowTiles, int kWidth, bool kQueryStays>
QKV_DEVICE void forward_unit(const ForwardTask<float>& task, int64_t unit) {
  const Problem<float>& p = task.forward.problem;
  using Shared = ForwardShared<Element, kRowTiles, kWidth>;
  const Shared shared(device::shared_memory(), p.head_dim);
  const int64_t columns = output_columns(task);
  const RowUnit<Shared::kRows, kWidth> u(p, unit, columns, task.splits);

  const RowTile& tile = shared.rows;
  const auto query = TileRows<Element>::of(p, p.query, u.batch, 1.0f, shared.query_offsets);
  tile.load<Shared::kRows>(p, u.packed, u.first_row, query.offsets);
  device::barrier();
  const bool masks = has_masks(p), modifies = changes_scores(p) || drops_weights(p);
  const KeyRange split = keys_of_split(p.keys, task.splits, u.split);
  const KeyRange any = u.keys_of_any(p).intersection(split);

  const auto key = TileKeys<Element>::of_head(p, p.key, u.batch, u.kv_head);
  const auto value = TileKeys<Element>::of_head(p, p.value, u.batch, u.kv_head);
  const int width = shared.step - kPadOfRow, steps = width / kStepOfProduct;
  const auto copy_keys = [&](int64_t n) {
    copy_rows<kKeys, kWidth>(key.tile(n, at_most(kKeys, any.end - n)), 0, p.head_dim, width,
                             shared.keys, shared.step);
  };
  copy_rows<Shared::kRows, kWidth>(query, 0, p.head_dim, width, shared.query, shared.step);
  if (!any.empty()) copy_keys(any.begin - any.begin % kKeys);
  device::wait_for_copies();
  device::barrier();

  const int first_row = warp() * kRowTiles * kRowsOfProduct;
  const auto load_query = [&](int t, int k, uint32_t(&a)[4]) {
    load_left(shared.query + (first_row + t * kRowsOfProduct) * shared.step + k * kStepOfProduct,
              shared.step, a);
  };
  uint32_t staying[kQueryStays ? kStayingSteps : 1][kRowTiles][4];
  if constexpr (kQueryStays) {
#pragma unroll
    for (int k = 0; k < kStayingSteps; ++k) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        if (k < steps) load_query(t, k, staying[k][t]);
      }
    }
  }

  // Sums of a group of tiles, and of all.
  Softmax softmax[kRowTiles][2], softmax_of_all[kRowTiles][2];
  float rounded_sum[kRowTiles][2] = {}, rounded_sum_of_all[kRowTiles][2] = {};
  Sums<kRowTiles, kWidth> out;
  volatile Sums<kRowTiles, kWidth> out_of_all = {};
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax[t][half].clear();
      softmax_of_all[t][half].clear();
    }
    set_to_zero(out[t]);
  }

  const auto add_tile = [&](int64_t n, int keys, bool partial) {
    device::wait_for_copies();
    device::barrier();  // K is there, and nobody reads the V before
    copy_rows<kKeys, kWidth>(value.tile(n, keys), u.first_column, columns, kWidth, shared.values,
                             Shared::kValueStep);
    Pairs<kRowTiles> s;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) set_to_zero(s[t]);
    if constexpr (kQueryStays) {
      const auto staying_query = [&](int t, int k, uint32_t(&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = staying[k][t][i];
      };
#pragma unroll
      for (int k = 0; k < kStayingSteps; ++k) {
        if (k < steps) {
          multiply_step<Element, kRowTiles>(staying_query, shared.keys, shared.step, k, s);
        }
      }
    } else {
#pragma unroll 2
      for (int k = 0; k < steps; ++k) {
        multiply_step<Element, kRowTiles>(load_query, shared.keys, shared.step, k, s);
      }
    }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4 * kTilesOfOthers; ++i) s[t][i / 4][i % 4] *= p.scale;
    }
    uint32_t kept[kRowTiles], stays[kRowTiles];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) kept[t] = stays[t] = 0xffffffff;
    if (modifies) {
      modify_pairs<Shared, kRowTiles>(p, u.batch, first_row, n, keys, s, kept, stays);
    } else if (partial) {
      cut_pairs<kRowTiles>(tile, first_row, n, keys, s, kept);
    }
    weigh_scores<Element, kRowTiles, kWidth>(drops_weights(p), stays, s, softmax, rounded_sum, out);
    const HalfPairs<Element, 1, kRowTiles> weights(s);
    device::wait_for_copies();
    device::barrier();  // V is there, and nobody reads this K
    if (n + kKeys < any.end) copy_keys(n + kKeys);
    if (partial) {
      multiply_kept_pairs<kWidth>(weights, kept, shared.values, Shared::kValueStep, out);
    } else {
      multiply_pairs<kWidth>(weights, shared.values, Shared::kValueStep, out);
    }
  };
  u.for_each_tile(p, any, masks, add_tile, [&] {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Softmax& all = softmax_of_all[t][half];
        const float correction = all.raise_max(softmax[t][half].max);
        all.sum += softmax[t][half].sum;
        softmax[t][half].sum = 0.0f;
        float& rounded_of_all = rounded_sum_of_all[t][half];
        rounded_of_all = rounded_of_all * correction + rounded_sum[t][half];
        rounded_sum[t][half] = 0.0f;
#pragma unroll
        for (int c = 0; c < kWidth / 8; ++c) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            out_of_all[t][c][i] = out_of_all[t][c][i] * correction;
          }
        }
      }
      end_group(out[t], out_of_all[t]);
    }
  });

  const ForwardResult<Element> result(task, u.batch);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = softmax_of_all[t][half].max, sum = sum_of_lanes<4>(softmax_of_all[t][half].sum);
      const float sum_of_rounded = sum_of_lanes<4>(rounded_sum_of_all[t][half]);
      // What the product lacks of that of weights that add up to sum.
      const float lack = sum_of_rounded == 0.0f ? 1.0f : sum / sum_of_rounded;
      const int r = first_row + t * kRowsOfProduct + row_of_number(2 * half);
      if (!tile.exists(r)) continue;
      const bool writes_scalars = u.chunk == 0 && lane() % 4 == 0;
      const int64_t head = device::load_shared(tile.head + r);
      const int64_t i_query = device::load_shared(tile.query + r);
      if (task.splits > 1) {
        float* row = partial_row(task, u.head, u.first_row + r) + u.split * partial_step(p);
#pragma unroll
        for (int i = 0; i < kWidth / 4; ++i) {
          const int64_t column = u.first_column + i / 2 * 8 + column_of_number(i % 2);
          if (column < columns) {
            device::store_global(row + column, lack * out_of_all[t][i / 2][2 * half + i % 2]);
          }
        }
        if (writes_scalars) {
          device::store_global(row + p.value_dim, max);
          device::store_global(row + p.value_dim + 1, sum);
        }
        continue;
      }
      const bool has_keys = sum != 0.0f;
      const float normaliser = lack * result.finish(head, max, sum);
      write_row<kWidth, Element>(
          out_of_all[t], half, normaliser, u.first_column, columns,
          {result.out_row(head, i_query), task.forward.out.column_stride},
          {result.rest_row(head, i_query), task.forward.out_rest.column_stride});
      if (writes_scalars) result.write_lse(head, i_query, max, sum, has_keys);
    }
  }
}

/// Blocks that should share a multiprocessor: as many as registers allow.
template <int kRowTiles>
constexpr int kBlocksAtOnce = kRowTiles == 1 ? 3 : 2;

template <class Element, int kRowTiles, int kWidth, bool kQueryStays>
QKV_KERNEL(kThreadsOfBlock, kBlocksAtOnce<kRowTiles>)
attention_forward_kernel(QKV_PARAMS ForwardTask<float> task, QKV_PARAMS int64_t units) {
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    forward_unit<Element, kRowTiles, kWidth, kQueryStays>(task, unit);
    device::barrier();
  }
}

}  // namespace qkv::kernels::sm80
