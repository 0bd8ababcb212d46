#pragma once

#include "kernels/cuda/simt/forward_result.cuh"

// What ranges of the keys have left, each under its own maximum, put together in their order.

namespace qkv::kernels::simt {

/// What the sums of some keys under their own maximum are multiplied with when they are added to
/// others. That maximum is -inf if they kept nothing, nothing but NaN, or only scores of -inf,
/// whose sums are 0, or NaN if a value that was kept is.
template <class T>
QKV_DEVICE T factor_of_part(T max_of_part, T max) {
  if (max_of_part == -infinity<T>()) return max == -infinity<T>() ? T(1) : T(0);
  return natural_exp(max_of_part - max);
}

/// Output and logsumexp from the partial results of all splits. A warp for each row.
template <class Element>
QKV_KERNEL(kThreads, 1)
merge_forward_kernel(QKV_PARAMS ForwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const Problem<T>& p = task.forward.problem;
  const int lane = device::thread() % device::kWarp;
  for (int64_t unit = device::block() * kWarps + device::thread() / device::kWarp; unit < units;
       unit += device::blocks() * kWarps) {
    const int64_t kv = unit / rows_of_kv_head(p), packed_row = unit % rows_of_kv_head(p);
    const PackedRows packed = rows_of_kv_head(p, kv % p.kv_heads);
    const int64_t head = packed.head(packed_row), query = packed.query(packed_row);
    const T* row = partial_row(task, kv, packed_row);
    const auto of_split = [&](int64_t split, int64_t column) {
      return device::load_global(row + split * partial_step(p) + column);
    };

    // A lane knows of one split what all columns need.
    const T own_max = lane < task.splits ? of_split(lane, p.value_dim) : -infinity<T>();
    const T own_sum = lane < task.splits ? of_split(lane, p.value_dim + 1) : T(0);
    T max = maximum_of_lanes<device::kWarp>(own_max), sum = T(0);
    const T factor = factor_of_part(own_max, max);
    for (int s = 0; s < task.splits; ++s) {
      sum += device::shuffle(factor, s) * device::shuffle(own_sum, s);
    }
    const ForwardResult<Element> result(task, kv / p.kv_heads);
    const bool has_keys = sum != T(0);
    const T normaliser = result.finish(head, max, sum);
    for (int64_t first = 0; first < output_columns(task); first += device::kWarp) {
      const int64_t column = first + lane;
      const bool exists = column < output_columns(task);
      T out = T(0);
#pragma unroll 8
      for (int s = 0; s < task.splits; ++s) {
        const T part = exists ? of_split(s, column) : T(0);
        out += device::shuffle(factor, s) * part;
      }
      if (exists) result.write(head, query, column, normaliser * out);
    }
    if (lane == 0) result.write_lse(head, query, max, sum, has_keys);
  }
}

}  // namespace qkv::kernels::simt
