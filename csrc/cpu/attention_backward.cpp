// _attention_backward on CPU: tensors to Params; parallel loops over splits of the keys, to sum
// their parts of grad_query, for the mask's gradient and for what heads have one number of.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "cpu/gradients.h"
#include "cpu/heads.h"
#include "cpu/kernels.h"
#include "cpu/readable.h"
#include "cpu/units.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

/// The gradients of alibi_slopes and sinks, per head by a kernel.
template <class T>
void run_heads(const kernels::BackwardParams<T>& backward, const Operands& x,
               const Gradients& grads, const Needs& needs) {
  const int64_t heads = backward.problem.batch * backward.problem.query_heads;
  std::vector<double> slopes(needs[4] ? heads : 0), sinks(needs[5] ? heads : 0);
  kernels::HeadGradientParams<T> params{backward, needs[4] ? slopes.data() : nullptr,
                                        needs[5] ? sinks.data() : nullptr};
  for_each_unit(heads, 0,
                [&](int64_t unit, void*) { kernels_for<T>().head_gradient(params, unit); });
  if (needs[4]) sum_over_batch(slopes, x, grads[4]);
  if (needs[5]) sum_over_batch(sinks, x, grads[5]);
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

  const auto& kernels = kernels_for<T>();
  if (needs[0] || needs[1] || needs[2] || needs[4]) {
    run_splits<T, kernels::BackwardParams<T>>(
        backward, backward,
        {kernels.backward_scratch_bytes, kernels.partial_grad_query_size, kernels.backward,
         kernels.sum_grad_query});
  }
  if (needs[3]) {
    for_each_unit(kernels.mask_gradient_units(backward.problem, params.grad_mask),
                  kernels.mask_gradient_scratch_bytes(params), [&](int64_t unit, void* scratch) {
                    kernels.mask_gradient(params, unit, scratch);
                  });
  }
  if (needs[4] || needs[5]) run_heads(backward, x, grads, needs);
}

TensorTuple<6> attention_backward(const Operands& operands, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const Tensor& out,
                                  const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
                                  Needs needs) {
  constexpr const char* kOp = "qkv::_attention_backward";
  check_backward(kOp, operands, grad_out, grad_lse, out, lse, out_rest, lse_rest, needs);
  check_batch_dimensions(operands);
  const Gradients results = empty_gradients(operands, needs);
  const bool nothing_attends = lse.numel() == 0 || operands.key.size(-2) == 0;
  if (nothing_attends && !(needs[5] && lse.numel() > 0)) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }

  const auto real = lse.scalar_type();
  const auto run_in = real == at::kDouble ? &run<double> : &run<float>;
  // Batch dimensions must merge if there are many. Those of out do if the query's did.
  const bool many = operands.query.dim() - 3 > kernels::kMaxBatchRank;
  const Tensor incoming = many ? at::empty_like(out).copy_(grad_out) : grad_out;
  for (const Heads& heads : ranges_of_heads(operands, needs)) {
    // Gradients are summed in memory in the numbers that all sums are taken in, and rounded once.
    const Gradients to = heads.of(results, needs);
    const Gradients grads = writable(to, real);
    if (needs[3]) grads[3].zero_();
    OptionalTensor dense_grad_lse;
    if (grad_lse) dense_grad_lse = heads.of_scalars(*grad_lse);
    run_in(readable(heads.of(operands), real), readable(heads.of_rows(incoming), real),
           dense_grad_lse, exact_output(heads.of_rows(out), heads.of_rows(out_rest), real),
           heads.of_scalars(lse), heads.of_scalars(lse_rest), grads, needs);
    put(grads, to);
  }
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv::cpu
