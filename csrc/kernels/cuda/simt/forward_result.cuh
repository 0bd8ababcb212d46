#pragma once

#include "kernels/cuda/simt/tasks.h"
#include "kernels/cuda/simt/tile.cuh"
#include "kernels/logsumexp.h"
#include "kernels/philox.h"

// Where the sums of a row go when a block has seen its keys: normalised to out and lse; or, if the
// keys are cut into splits, as they are to a partial result, which merge.cuh adds to the others.

namespace qkv::kernels::simt {

/// A lane of the warp that merges a row knows one split.
constexpr int kMostSplits = device::kWarp;

/// Splits are cut at multiples of 64 keys, as evenly as that allows.
QKV_INLINE KeyRange keys_of_split(int64_t keys, int64_t splits, int64_t split) {
  const int64_t blocks = ceil_divide(keys, kOthers);
  const int64_t begin = blocks * split / splits * kOthers;
  const int64_t end = blocks * (split + 1) / splits * kOthers;
  return {begin, end < keys ? end : keys};
}

/// Numbers of the row of a partial result: [ out (Dv), not normalised | max | sum ].
template <class T>
QKV_INLINE int64_t partial_row_size(const Problem<T>& p) {
  return p.value_dim + 2;
}

/// Columns of the output that is asked for.
template <class T>
QKV_INLINE int64_t output_columns(const ForwardTask<T>& task) {
  return task.forward.out.data != nullptr ? task.forward.problem.value_dim : 0;
}

/// A packed row of head `head` of key and value in the batch, in the first split.
template <class T>
QKV_DEVICE T* partial_row(const ForwardTask<T>& task, int64_t head, int64_t row) {
  const Problem<T>& p = task.forward.problem;
  return task.forward.partial +
         (head * task.splits * rows_of_kv_head(p) + row) * partial_row_size(p);
}

/// From one split's row to the next split's.
template <class T>
QKV_DEVICE int64_t partial_step(const Problem<T>& p) {
  return rows_of_kv_head(p) * partial_row_size(p);
}

/// Puts the partial results of a task's splits together (merge.cuh).
template <class Element>
int merge_splits(const ForwardTask<Real<Element>>& task, void* stream);

/// The results of a batch element.
template <class Element>
class ForwardResult {
 public:
  using T = Real<Element>;

  QKV_DEVICE ForwardResult(const ForwardTask<T>& task, int64_t batch)
      : task_(task),
        p_(task.forward.problem),
        batch_(batch),
        out_(batch_of<Element>(p_, task.forward.out, batch)),
        rest_(sizeof(Element) == 2 ? batch_of<Element>(p_, task.forward.out_rest, batch) : nullptr),
        sinks_(p_.sinks.data + batch_offset(p_, batch, p_.sinks.batch_stride)),
        dropout_(dropout_scale<T>(p_.dropout)) {}

  /// Takes the sink, if there is one, into a row's maximum and sum. Returns what its output is
  /// multiplied with.
  QKV_DEVICE T finish(int64_t head, T& max, T& sum) const {
    T normaliser = sum == T(0) ? T(0) : T(1) / sum;
    if (p_.sinks.data != nullptr) {
      normaliser = add_sink(device::load_global(sinks_ + head * p_.sinks.head_stride), max, sum);
    }
    return normaliser * dropout_;
  }

  QKV_DEVICE bool needs_rest() const { return sizeof(Element) == 2 && rest_ != nullptr; }

  /// A number of out and, where it is needed, what rounding takes from it.
  QKV_DEVICE void write(int64_t head, int64_t query, int64_t column, T x) const {
    store_number(out_row(head, query) + column * task_.forward.out.column_stride, x);
    if (needs_rest()) {
      store_rest(rest_row(head, query) + column * task_.forward.out_rest.column_stride, x);
    }
  }

  /// Where a row of out begins, and of what rounding takes from it.
  QKV_DEVICE Element* out_row(int64_t head, int64_t query) const {
    return out_ + head * task_.forward.out.head_stride + query * task_.forward.out.row_stride;
  }
  QKV_DEVICE Element* rest_row(int64_t head, int64_t query) const {
    return rest_ + head * task_.forward.out_rest.head_stride +
           query * task_.forward.out_rest.row_stride;
  }

  /// From a row's maximum and sum after finish(), and whether there was a sum before.
  QKV_DEVICE void write_lse(int64_t head, int64_t query, T max, T sum, bool has_keys) const {
    T lse, rest;
    log_of_sum(max, sum, lse, rest);
    if (!has_keys) rest = kRestWithoutKeys<T>;
    const int64_t scalar = (batch_ * p_.query_heads + head) * p_.queries + query;
    device::store_global(task_.forward.lse + scalar, lse);
    device::store_global(task_.forward.lse_rest + scalar, rest);
  }

 private:
  const ForwardTask<T>& task_;
  const Problem<T>& p_;
  int64_t batch_;
  Element* out_;
  Element* rest_;
  const T* sinks_;
  T dropout_;
};

}  // namespace qkv::kernels::simt
