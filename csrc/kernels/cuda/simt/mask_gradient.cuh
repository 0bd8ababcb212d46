#pragma once

#include "kernels/cuda/simt/attention_backward.cuh"
#include "kernels/mask_broadcast.h"

// The gradient of an additive mask is dS itself, summed over the dimensions in which the mask is
// broadcast (its stride is 0 there). A block owns 64 x 64 elements of the gradient, or the one row
// or column that a broadcast leaves, and walks over everything that reads them, in a fixed order:
//
//     grad_mask (b, h, i, j) = sum of dS (b', h', i', j')
//                              over all that read element (b, h, i, j) of the mask

namespace qkv::kernels::simt {

/// How many units there are of each kind; a dimension that is summed over has one.
struct MaskUnits {
  int64_t batches;
  int64_t heads;
  int64_t row_tiles;
  int64_t key_tiles;

  template <class T>
  static QKV_INLINE MaskUnits of(const Problem<T>& p, const Operand<T>& mask) {
    MaskUnits units{batches_of_mask(p, mask), 1, 1, 1};
    if (mask.head_stride != 0) units.heads = p.query_heads;
    if (mask.row_stride != 0) units.row_tiles = ceil_divide(p.queries, kOwns);
    if (mask.column_stride != 0) units.key_tiles = ceil_divide(p.keys, kOthers);
    return units;
  }

  QKV_INLINE int64_t count() const { return batches * heads * row_tiles * key_tiles; }
};

/// What a block has in shared memory. Rows are WeightRows and more.
template <class T, class Rows>
struct MaskGradientShared {
  SharedMemory memory;
  Stages<T> stages = Stages<T>::in(memory, stage_numbers<T, kOthersOfThread>(false));
  double* sums = memory.take<double>(kSide * kOthers);  // [16][64]
  Rows rows = Rows::template in<kOwns>(memory);

  explicit constexpr QKV_INLINE MaskGradientShared(char* begin) : memory(begin) {}
};

/// A tile of rows of one head, and the keys of a unit that it sees.
struct MaskRows {
  int64_t batch;
  int64_t head;
  int64_t first_row;
  int rows;
  KeyRange keys;
};

/// add(MaskRows, sum, end_tile) adds what these rows have of each element of the mask, by its
/// thread, and calls end_tile() after each tile. So many tiles may add to an element that all but
/// the sums of a group of them are taken in double.
template <class T, class Add>
QKV_DEVICE void sum_over_mask(const Problem<T>& p, const Operand<T>& mask, int64_t unit,
                              double* sums_of_threads, Add add) {
  const MaskUnits units = MaskUnits::of(p, mask);
  const int64_t key_tile = unit % units.key_tiles;
  unit /= units.key_tiles;
  const int64_t row_tile = unit % units.row_tiles;
  unit /= units.row_tiles;
  const int64_t mask_head = unit % units.heads, mask_batch = unit / units.heads;

  const bool every_row = mask.row_stride == 0, every_key = mask.column_stride == 0;
  const int64_t summed_batches = p.batch / units.batches;
  const int64_t first_head = mask.head_stride != 0 ? mask_head : 0;
  const int64_t end_head = mask.head_stride != 0 ? mask_head + 1 : p.query_heads;
  const int64_t begin_row = row_tile * kOwns;
  const int64_t end_row = every_row ? p.queries : begin_row + 1;
  const int64_t begin_key = key_tile * kOthers;
  const int64_t end_key = every_key || begin_key + kOthers > p.keys ? p.keys : begin_key + kOthers;

  // Of a group of tiles, and of all.
  T sum[kLeastOwn][kOthersOfThread];
  volatile double sum_of_all[kLeastOwn][kOthersOfThread];
  set_to_zero(sum);
  set_to_zero(sum_of_all);
  int others = 0;
  const auto end_tile = [&] {
    others += kOthers;
    if (others < kOthersOfGroup) return;
    end_group(sum, sum_of_all);
    others = 0;
  };
  for (int64_t b = 0; b < summed_batches; ++b) {
    const int64_t batch = batch_of_mask(p, mask, mask_batch, b);
    for (int64_t head = first_head; head < end_head; ++head) {
      for (int64_t row = begin_row; row < end_row; row += kOwns) {
        const int rows = at_most(kOwns, p.queries - row);
        const KeyRange keys =
            keys_of_any(p.band, row, row + rows - 1, p.keys).intersection({begin_key, end_key});
        if (keys.empty()) continue;
        add(MaskRows{batch, head, row, rows, keys}, sum, end_tile);
      }
    }
  }
  end_group(sum, sum_of_all);

  if (every_key) {
#pragma unroll
    for (int i = 0; i < kLeastOwn; ++i) {
      sum_of_all[i][0] = sum_of_lanes<kSide>((sum_of_all[i][0] + sum_of_all[i][1]) +
                                             (sum_of_all[i][2] + sum_of_all[i][3]));
    }
  }
  if (every_row) {
    device::barrier();
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) {
      device::store_shared(
          sums_of_threads + thread_y() * kOthers + thread_x() * kOthersOfThread + j,
          (sum_of_all[0][j] + sum_of_all[1][j]) + (sum_of_all[2][j] + sum_of_all[3][j]));
    }
    device::barrier();
  }
  T* of_head = mask.data +
               batch_offset(p, batch_of_mask(p, mask, mask_batch, 0), mask.batch_stride) +
               mask_head * mask.head_stride;
#pragma unroll
  for (int i = 0; i < kLeastOwn; ++i) {
    const int r = thread_y() * kLeastOwn + i;
    if (every_row ? r > 0 : begin_row + r >= p.queries) continue;
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) {
      const int k = thread_x() * kOthersOfThread + j;
      if (every_key ? k > 0 : begin_key + k >= p.keys) continue;
      double x = sum_of_all[i][j];
      if (every_row) {
        x = 0.0;
        for (int y = 0; y < kSide; ++y) x += device::load_shared(sums_of_threads + y * kOthers + k);
      }
      device::store_global(
          of_head + (begin_row + r) * mask.row_stride + (begin_key + k) * mask.column_stride,
          static_cast<T>(x));
    }
  }
  device::barrier();
}

template <class T>
QKV_DEVICE void add_pairs(const T (&x)[kLeastOwn][kOthersOfThread],
                          T (&sum)[kLeastOwn][kOthersOfThread]) {
#pragma unroll
  for (int i = 0; i < kLeastOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) sum[i][j] += x[i][j];
  }
}

/// sum += dS of a tile.
template <class Element, class EndTile>
QKV_DEVICE void add_score_gradients(
    const BackwardTask<Real<Element>>& task, const MaskRows& tile,
    const MaskGradientShared<Real<Element>, BackwardRows<Real<Element>>>& shared,
    Real<Element> (&sum)[kLeastOwn][kOthersOfThread], EndTile end_tile) {
  using T = Real<Element>;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  const int64_t kv_head = tile.head / (p.query_heads / p.kv_heads);
  const BackwardRows<T>& table = shared.rows;
  const Scores<T> scores(p, tile.batch);
  const auto query = TileRows<Element>::of(p, p.query, tile.batch, p.scale, table.query_offsets);
  const auto grad_out =
      TileRows<Element>::of(p, params.grad_out, tile.batch, T(1), table.grad_out_offsets);
  const auto key = TileKeys<Element>::of_head(p, p.key, tile.batch, kv_head);
  const auto value = TileKeys<Element>::of_head(p, p.value, tile.batch, kv_head);
  const T drop_scale = dropout_scale<T>(p.dropout);
  device::barrier();
  table.template load<kOwns>(task, tile.batch, {tile.head, 1, p.queries}, tile.first_row, query,
                             grad_out);
  device::barrier();
  for (int64_t n = tile.keys.begin - tile.keys.begin % kOthers; n < tile.keys.end; n += kOthers) {
    const int keys = at_most(kOthers, tile.keys.end - n);
    T s[kLeastOwn][kOthersOfThread], g[kLeastOwn][kOthersOfThread];
    multiply_pairs<kLeastOwn>(query, key.tile(n, keys), p.head_dim, shared.stages, s);
    multiply_pairs<kLeastOwn>(grad_out, value.tile(n, keys), p.value_dim, shared.stages, g);
    through_softmax<false, true>(scores, table, n, tile.rows, keys, true, drop_scale, s, g,
                                 static_cast<T*>(nullptr));
    add_pairs(g, sum);
    end_tile();
  }
}

template <class Element>
QKV_KERNEL(kThreads, blocks_at_once<Real<Element>>(48))
mask_gradient_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const MaskGradientShared<T, BackwardRows<T>> shared(device::shared_memory());
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    sum_over_mask(task.backward.problem, task.backward.grad_mask, unit, shared.sums,
                  [&](const MaskRows& tile, T(&sum)[kLeastOwn][kOthersOfThread], auto end_tile) {
                    add_score_gradients<Element>(task, tile, shared, sum, end_tile);
                  });
  }
}

}  // namespace qkv::kernels::simt
