// _attention_backward on CPU: tensors to Params; parallel loops over splits of the keys, to sum
// their parts of grad_query, for the mask's gradient and for what heads have one number of.

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "checks.h"
#include "cpu/kernels.h"
#include "cpu/problem.h"
#include "cpu/units.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

/// How many ranges the keys of a head are cut into. Of N alone: the bits of a gradient depend on
/// it, and must not depend on the number of threads or on the batch.
int64_t number_of_splits(int64_t keys) { return std::clamp<int64_t>(keys / 512, 1, 8); }

template <class T>
void run_splits(kernels::BackwardParams<T>& params) {
  const auto& kernels = kernels_for<T>();
  const int64_t heads = params.problem.batch * params.problem.kv_heads;
  // The parts of grad_query are kept for a few heads at a time, enough to occupy all threads.
  const bool sums = params.splits > 1 && params.grad_query.data != nullptr;
  const int64_t units_at_once = 4 * static_cast<int64_t>(at::get_num_threads());
  const int64_t heads_at_once =
      sums ? std::min(heads, (units_at_once + params.splits - 1) / params.splits) : heads;
  const int64_t partial_numbers =
      sums ? heads_at_once * kernels.partial_grad_query_size(params) : 0;
  const auto partial = c10::GetCPUAllocator()->allocate(partial_numbers * sizeof(T));
  params.partial_grad_query = static_cast<T*>(partial.get());

  const int64_t scratch_bytes = kernels.backward_scratch_bytes(params);
  for (int64_t head = 0; head < heads; head += heads_at_once) {
    const int64_t count = std::min(heads_at_once, heads - head);
    for_each_unit(count * params.splits, scratch_bytes, [&](int64_t unit, void* scratch) {
      kernels.backward(params, head, unit, scratch);
    });
    if (!sums) continue;
    for_each_unit(
        count * kernels.backward_row_tiles(params.problem), scratch_bytes,
        [&](int64_t unit, void* scratch) { kernels.sum_grad_query(params, head, unit, scratch); });
  }
}

/// The gradients of alibi_slopes and sinks: per head by a kernel, then summed over the batch in
/// order (sums of ATen depend on the number of threads).
template <class T>
void run_heads(const kernels::BackwardParams<T>& backward, const Operands& x,
               const Gradients& grads, const Needs& needs) {
  const kernels::Problem<T>& p = backward.problem;
  const auto of_heads = [&](bool needed) {
    return std::vector<double>(needed ? p.batch * p.query_heads : 0);
  };
  std::vector<double> slopes = of_heads(needs[4]), sinks = of_heads(needs[5]);
  kernels::HeadGradientParams<T> params{backward, needs[4] ? slopes.data() : nullptr,
                                        needs[5] ? sinks.data() : nullptr};
  for_each_unit(p.batch * p.query_heads, 0,
                [&](int64_t unit, void*) { kernels_for<T>().head_gradient(params, unit); });

  auto sizes = x.query.sizes().vec();
  sizes.resize(sizes.size() - 2);
  const auto sum = [&](const std::vector<double>& of_heads, const Tensor& grad) {
    const Tensor total = at::zeros(grad.sizes(), grad.options().dtype(at::kDouble));
    const Tensor total_of_head = total.expand(sizes);
    const auto strides = total_of_head.strides();
    for (size_t unit = 0; unit < of_heads.size(); ++unit) {
      auto left = static_cast<int64_t>(unit);
      int64_t offset = 0;
      for (size_t d = sizes.size(); d-- > 0; left /= sizes[d])
        offset += left % sizes[d] * strides[d];
      total.mutable_data_ptr<double>()[offset] += of_heads[unit];
    }
    grad.copy_(total);
  };
  if (needs[4]) sum(slopes, grads[4]);
  if (needs[5]) sum(sinks, grads[5]);
}

template <class T>
void run(const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse,
         const Tensor& out, const Tensor& lse, const Tensor& lse_rest, const Gradients& grads,
         const Needs& needs) {
  kernels::MaskGradientParams<T> params{};
  kernels::BackwardParams<T>& backward = params.backward;
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(backward.problem, x, batch);
  describe(backward.grad_out, grad_out, batch);
  describe(backward.out, out, batch);
  if (needs[0]) describe(backward.grad_query, grads[0], batch);
  if (needs[1]) describe(backward.grad_key, grads[1], batch);
  if (needs[2]) describe(backward.grad_value, grads[2], batch);
  if (needs[3]) describe(params.grad_mask, grads[3], batch);
  batch.complete(backward.problem);
  backward.lse = static_cast<const T*>(lse.const_data_ptr());
  backward.lse_rest = static_cast<const T*>(lse_rest.const_data_ptr());
  backward.grad_lse = grad_lse ? static_cast<const T*>(grad_lse->const_data_ptr()) : nullptr;
  backward.splits = number_of_splits(backward.problem.keys);
  const auto slope_gradient =
      c10::GetCPUAllocator()->allocate(needs[4] ? backward.splits * lse.numel() * sizeof(T) : 0);
  backward.slope_gradient_of_rows = needs[4] ? static_cast<T*>(slope_gradient.get()) : nullptr;

  if (needs[0] || needs[1] || needs[2] || needs[4]) run_splits(backward);
  if (needs[3]) {
    const auto& kernels = kernels_for<T>();
    for_each_unit(
        kernels.mask_gradient_units(params), kernels.mask_gradient_scratch_bytes(params),
        [&](int64_t unit, void* scratch) { kernels.mask_gradient(params, unit, scratch); });
  }
  if (needs[4] || needs[5]) run_heads(backward, x, grads, needs);
}

TensorTuple<6> attention_backward(const Operands& operands, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const Tensor& out,
                                  const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
                                  Needs needs) {
  constexpr const char* kOp = "qkv::_attention_backward";
  check_operands(kOp, operands);
  check_needs(kOp, operands, needs);
  check_grad_outputs(kOp, operands, grad_out, grad_lse);
  check_forward_results(kOp, operands, out, lse, out_rest, lse_rest);
  check_batch_dimensions(operands);
  const Gradients results = empty_gradients(operands, needs);
  const bool nothing_attends = lse.numel() == 0 || operands.key.size(-2) == 0;
  if (nothing_attends && !(needs[5] && lse.numel() > 0)) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }

  // Gradients are summed in memory in the numbers that all sums are taken in, and rounded once.
  const auto real = lse.scalar_type();
  Gradients grads;
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = writable(results[i], real);
  if (needs[3]) grads[3].zero_();

  OptionalTensor dense_grad_lse;
  if (grad_lse) dense_grad_lse = grad_lse->contiguous();
  const auto run_in = real == at::kDouble ? &run<double> : &run<float>;
  // Batch dimensions must merge if there are many. Those of out do if the query's did.
  const bool many = operands.query.dim() - 3 > kernels::kMaxBatchRank;
  const Tensor incoming = many ? at::empty_like(out).copy_(grad_out) : grad_out;
  const Tensor exact_out =
      has_16_bits(out) ? readable(out, real).add(out_rest) : readable(out, real);
  run_in(readable(operands, real), readable(incoming, real), dense_grad_lse,
         with_unit_columns(exact_out), lse.contiguous(), lse_rest.contiguous(), grads, needs);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].is_same(results[i])) results[i].copy_(grads[i]);
  }
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv::cpu
