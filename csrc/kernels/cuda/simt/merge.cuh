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

    T max = -infinity<T>();
    for (int64_t s = 0; s < task.splits; ++s) max = maximum(max, of_split(s, p.value_dim));
    const auto sum_of_splits = [&](int64_t column) {
      T sum = T(0);
      for (int64_t s = 0; s < task.splits; ++s) {
        sum += factor_of_part(of_split(s, p.value_dim), max) * of_split(s, column);
      }
      return sum;
    };
    const ForwardResult<Element> result(task, kv / p.kv_heads);
    T max_with_sink = max, sum = sum_of_splits(p.value_dim + 1);
    const bool has_keys = sum != T(0);
    const T normaliser = result.finish(head, max_with_sink, sum);
    for (int64_t column = lane; column < output_columns(task); column += device::kWarp) {
      result.write(head, query, column, normaliser * sum_of_splits(column));
    }
    if (lane == 0) result.write_lse(head, query, max_with_sink, sum, has_keys);
  }
}

}  // namespace qkv::kernels::simt
