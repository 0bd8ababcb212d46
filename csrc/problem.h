#pragma once

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <vector>

#include "kernels/params.h"
#include "layout.h"
#include "operands.h"

// From tensors to what the kernels, on any device, are told about them.

namespace qkv {

/// x without repetitions in its first `rank` dimensions: those in which it is broadcast have
/// size 1.
inline Tensor without_repetitions(Tensor x, int64_t rank) {
  for (int64_t d = 0; d < rank; ++d) {
    if (x.stride(d) == 0 && x.size(d) > 1) x = x.narrow(d, 0, 1);
  }
  return x;
}

/// Where kernels write what goes to `result`: itself, if it has the kernels' dtype.
inline Tensor writable(const Tensor& result, at::ScalarType real) {
  return result.scalar_type() == real ? result
                                      : at::empty_like(result, result.options().dtype(real));
}

/// The batch dimensions of all tensors of one call. Neighbours that step alike in every tensor
/// are merged, so that most calls have one or none.
class BatchDimensions {
 public:
  /// Messages start with `op`.
  explicit BatchDimensions(at::IntArrayRef sizes, const char* op = "qkv")
      : sizes_(sizes.vec()), op_(op) {}

  /// A tensor with `inner_rank` dimensions after its batch; where the batch dimensions broadcast,
  /// its strides are 0. They go to `to` when the problem is completed.
  void add(const Tensor& x, int64_t inner_rank, int64_t* to);

  template <class T>
  void complete(kernels::Problem<T>& problem) {
    merge();
    problem.batch_rank = static_cast<int32_t>(sizes_.size());
    problem.batch = 1;
    for (size_t d = 0; d < sizes_.size(); ++d) {
      problem.batch_size[d] = sizes_[d];
      problem.batch *= sizes_[d];
    }
  }

 private:
  struct Strides {
    std::vector<int64_t> values;
    int64_t* to;
  };

  void merge();

  std::vector<int64_t> sizes_;
  const char* op_;
  std::vector<Strides> tensors_;
};

/// x, or a copy if it has more batch dimensions than kernels handle: these must merge then as those
/// of `like` do. The copy has the dimensions of `like` in their order, or is contiguous if `like`
/// has others.
inline Tensor merging_as(const Tensor& like, const Tensor& x, int64_t inner_rank = 3) {
  if (x.dim() - inner_rank <= kernels::kMaxBatchRank) return x;
  // Not at::empty_like, which moves the dimensions that `like` is broadcast in.
  return x.sizes() == like.sizes() ? empty_dense_like(like, like.sym_sizes()).copy_(x)
                                   : x.contiguous();
}
inline Tangents merging_as(const Operands& like, Tangents tangents) {
  const auto operands = like.tensors();
  for (size_t i = 0; i < tangents.size(); ++i) {
    if (!tangents[i]) continue;
    tangents[i] = merging_as(*operands[i], *tangents[i], Operands::kInnerRanks[i]);
  }
  return tangents;
}

/// The stride of dimension d (from the end), 0 where x is broadcast, or has no memory to step in.
inline int64_t broadcast_stride(const Tensor& x, int64_t d) {
  return x.dim() < d || x.size(-d) == 1 || x.numel() == 0 ? 0 : x.stride(-d);
}

/// A tensor (batch.., head, row, column).
template <class T>
void describe(kernels::Operand<T>& operand, const Tensor& x, BatchDimensions& batch) {
  operand.data = static_cast<T*>(x.data_ptr());
  operand.head_stride = broadcast_stride(x, 3);
  operand.row_stride = broadcast_stride(x, 2);
  operand.column_stride = broadcast_stride(x, 1);
  batch.add(x, 3, operand.batch_stride);
}

template <class T>
void describe(kernels::Operand<const T>& operand, const Tensor& x, BatchDimensions& batch) {
  operand.data = static_cast<const T*>(x.const_data_ptr());
  operand.head_stride = broadcast_stride(x, 3);
  operand.row_stride = broadcast_stride(x, 2);
  operand.column_stride = 1;
  batch.add(x, 3, operand.batch_stride);
}

inline kernels::Storage storage_of(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? kernels::Storage::kBFloat16
         : x.scalar_type() == at::kHalf   ? kernels::Storage::kFloat16
                                          : kernels::Storage::kSame;
}

/// The sizes of a problem, without any tensor.
template <class T>
kernels::Problem<T> sizes_of(const Operands& x) {
  kernels::Problem<T> problem{};
  problem.query_heads = x.query.size(-3);
  problem.kv_heads = x.key.size(-3);
  problem.queries = x.query.size(-2);
  problem.keys = x.key.size(-2);
  problem.head_dim = x.query.size(-1);
  problem.value_dim = x.value.size(-1);
  problem.key_value_storage = storage_of(x.key);
  return problem;
}

/// Everything but the batch sizes, which `batch` completes.
template <class T>
void describe(kernels::Problem<T>& problem, const Operands& x, BatchDimensions& batch);

/// Raises an error if the operands have more batch dimensions than kernels handle; before anything
/// is allocated. Messages start with `op`.
void check_batch_dimensions(const char* op, const Operands& x);

template <class T>
void describe(kernels::Directions<T>& directions, const Tangents& tangents, BatchDimensions& batch);

}  // namespace qkv
