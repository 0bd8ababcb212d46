// _attention_backward on CPU: tensors to Params; one parallel loop over splits of the keys, one to
// sum their parts of grad_query, one for the mask's gradient.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

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

template <class T>
void run(const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse,
         const Tensor& out, const Tensor& lse, const std::array<Tensor, 4>& grads,
         std::array<bool, 4> needs) {
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
  backward.grad_lse = grad_lse ? static_cast<const T*>(grad_lse->const_data_ptr()) : nullptr;
  backward.splits = number_of_splits(backward.problem.keys);

  if (needs[0] || needs[1] || needs[2]) run_splits(backward);
  if (needs[3]) {
    const auto& kernels = kernels_for<T>();
    for_each_unit(
        kernels.mask_gradient_units(params), kernels.mask_gradient_scratch_bytes(params),
        [&](int64_t unit, void* scratch) { kernels.mask_gradient(params, unit, scratch); });
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Operands& operands,
                                                              const Tensor& grad_out,
                                                              const OptionalTensor& grad_lse,
                                                              const Tensor& out, const Tensor& lse,
                                                              std::array<bool, 4> needs) {
  const auto results = empty_gradients(operands, needs);
  const bool nothing_attends = lse.numel() == 0 || operands.key.size(-2) == 0;
  if (nothing_attends) {
    for (const Tensor& grad : results) grad.zero_();
    return {results[0], results[1], results[2], results[3]};
  }

  // The mask's gradient is summed in memory, and in the numbers that all sums are taken in.
  auto grads = results;
  if (needs[3] && grads[3].scalar_type() != lse.scalar_type()) {
    grads[3] = at::empty_like(grads[3], grads[3].options().dtype(lse.scalar_type()));
  }
  if (needs[3]) grads[3].zero_();

  const Operands x = with_unit_columns(operands);
  OptionalTensor dense_grad_lse;
  if (grad_lse) dense_grad_lse = grad_lse->contiguous();
  const auto run_in = lse.scalar_type() == at::kDouble ? &run<double> : &run<float>;
  run_in(x, with_unit_columns(grad_out), dense_grad_lse, with_unit_columns(out), lse.contiguous(),
         grads, needs);
  if (needs[3] && !grads[3].is_same(results[3])) results[3].copy_(grads[3]);
  return {results[0], results[1], results[2], results[3]};
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv::cpu
