#include "problem.h"

#include <c10/util/Exception.h>

namespace qkv {

namespace {

kernels::MaskType mask_type(const Tensor& mask) {
  switch (mask.scalar_type()) {
    case at::kBool:
      return kernels::MaskType::kBool;
    case at::kFloat:
      return kernels::MaskType::kFloat32;
    case at::kDouble:
      return kernels::MaskType::kFloat64;
    case at::kBFloat16:
      return kernels::MaskType::kBFloat16;
    case at::kHalf:
      return kernels::MaskType::kFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel reads an attn_mask of ", mask.scalar_type());
  }
}

}  // namespace

void BatchDimensions::add(const Tensor& x, int64_t inner_rank, int64_t* to) {
  std::vector<int64_t> strides(sizes_.size());
  for (size_t d = 0; d < sizes_.size(); ++d) {
    strides[d] = broadcast_stride(x, inner_rank + static_cast<int64_t>(sizes_.size() - d));
  }
  tensors_.push_back({std::move(strides), to});
}

void BatchDimensions::merge() {
  std::vector<int64_t> sizes;
  std::vector<size_t> last;  // the innermost of the dimensions merged into each
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (sizes_[d] == 1) continue;
    const bool continues =
        !sizes.empty() && std::all_of(tensors_.begin(), tensors_.end(), [&](const Strides& x) {
          return x.values[last.back()] == x.values[d] * sizes_[d];
        });
    if (continues) {
      sizes.back() *= sizes_[d];
      last.back() = d;
    } else {
      sizes.push_back(sizes_[d]);
      last.push_back(d);
    }
  }
  TORCH_CHECK_VALUE(sizes.size() <= kernels::kMaxBatchRank, op_,
                    ": the batch dimensions of query, key, value and masks, of sizes ",
                    at::IntArrayRef(sizes_), ", step in ", sizes.size(),
                    " different ways, but the kernels handle at most ", kernels::kMaxBatchRank,
                    "; make some of the tensors contiguous");
  for (const Strides& x : tensors_) {
    for (size_t d = 0; d < sizes.size(); ++d) x.to[d] = x.values[last[d]];
  }
  sizes_ = std::move(sizes);
}

namespace {

/// (batch.., Hq), or nothing
template <class T>
void describe(kernels::HeadNumbers<T>& numbers, const OptionalTensor& x, BatchDimensions& batch) {
  if (!x) return;
  numbers.data = static_cast<const T*>(x->const_data_ptr());
  numbers.head_stride = broadcast_stride(*x, 1);
  batch.add(*x, 1, numbers.batch_stride);
}

}  // namespace

template <class T>
void describe(kernels::Problem<T>& problem, const Operands& x, BatchDimensions& batch) {
  problem = sizes_of<T>(x);
  problem.scale = scale_of(x).to<T>();
  problem.softcap = softcap_of<T>(x);
  const auto number = [&](size_t i) { return x.band[i].guard_int(__FILE__, __LINE__); };
  const auto [left, right, query_offset] = clamped_band(number(0), number(1), number(2));
  problem.band = {left, right, query_offset};
  describe(problem.query, x.query, batch);
  describe(problem.key, x.key, batch);
  describe(problem.value, x.value, batch);
  problem.attn_mask.type = kernels::MaskType::kNone;
  if (x.attn_mask) {
    const Tensor& mask = *x.attn_mask;
    problem.attn_mask.data = mask.const_data_ptr();
    problem.attn_mask.type = mask_type(mask);
    problem.attn_mask.head_stride = broadcast_stride(mask, 3);
    problem.attn_mask.row_stride = broadcast_stride(mask, 2);
    problem.attn_mask.column_stride = broadcast_stride(mask, 1);
    batch.add(mask, 3, problem.attn_mask.batch_stride);
  }
  describe(problem.alibi_slopes, x.alibi_slopes, batch);
  describe(problem.sinks, x.sinks, batch);
  if (x.dropout_p > 0.0) {
    problem.dropout.threshold = static_cast<uint32_t>(dropout_threshold(x.dropout_p));
    problem.dropout.seed = static_cast<const int64_t*>(x.dropout_seed->const_data_ptr());
    problem.dropout.first_head = x.first_head;
    batch.add(*x.dropout_seed, 0, problem.dropout.batch_stride);
  }
  if (x.key_mask) {
    problem.key_mask.data = static_cast<const uint8_t*>(x.key_mask->const_data_ptr());
    problem.key_mask.column_stride = broadcast_stride(*x.key_mask, 1);
    batch.add(*x.key_mask, 1, problem.key_mask.batch_stride);
  }
}

template <class T>
void describe(kernels::Directions<T>& directions, const Tangents& tangents,
              BatchDimensions& batch) {
  if (tangents[0]) describe(directions.query, *tangents[0], batch);
  if (tangents[1]) describe(directions.key, *tangents[1], batch);
  if (tangents[2]) describe(directions.value, *tangents[2], batch);
  if (tangents[3]) {
    describe(directions.attn_mask, *tangents[3], batch);
    directions.attn_mask.column_stride = broadcast_stride(*tangents[3], 1);
  }
  describe(directions.alibi_slopes, tangents[4], batch);
  describe(directions.sinks, tangents[5], batch);
}

template void describe(kernels::Problem<float>&, const Operands&, BatchDimensions&);
template void describe(kernels::Problem<double>&, const Operands&, BatchDimensions&);
template void describe(kernels::Directions<float>&, const Tangents&, BatchDimensions&);
template void describe(kernels::Directions<double>&, const Tangents&, BatchDimensions&);

void check_batch_dimensions(const char* op, const Operands& x) {
  const int64_t rank = x.query.dim() - 3;
  if (rank <= kernels::kMaxBatchRank) return;
  if (x.query.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;  // when it is run
  BatchDimensions batch(x.query.sizes().slice(0, rank), op);
  int64_t strides[kernels::kMaxBatchRank];
  const auto tensors = x.tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]) batch.add(*tensors[i], Operands::kInnerRanks[i], strides);
  }
  kernels::Problem<float> problem;
  batch.complete(problem);
}

}  // namespace qkv
