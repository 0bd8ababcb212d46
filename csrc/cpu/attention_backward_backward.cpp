// _attention_backward_backward on CPU: tensors to Params; the same loops as in the backward, over
// splits of the rows.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "cpu/forward_pass.h"
#include "cpu/gradients.h"
#include "cpu/heads.h"
#include "cpu/prepared_heads.h"
#include "cpu/readable.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

using GradientsOfSecond = std::array<Tensor, 8>;

/// The tensors that the kernels read and write.
struct Tensors {
  Operands x;
  Tangents cotangents;
  Tensor grad_out;
  OptionalTensor grad_lse;
  Tensor out, lse, lse_rest;
  Tensor out_t, lse_t;  // also the gradients of grad_out and grad_lse
  Gradients grads;
  Needs needs;
};

/// The gradients of alibi_slopes and sinks, per head by a kernel.
template <class T>
void run_heads(const kernels::BackwardBackwardParams<T>& params, const Tensors& t) {
  const auto& kernels = kernels_for(params.backward.problem);
  const int64_t heads = params.backward.problem.batch * params.backward.problem.query_heads;
  std::vector<double> of_heads(heads);
  if (t.needs[4]) {
    const kernels::HeadGradientParams<T> slopes{params.backward, of_heads.data(), nullptr};
    for_each_unit(heads, 0, [&](int64_t unit, void*) { kernels.head_gradient(slopes, unit); });
    sum_over_batch(of_heads, t.x, t.grads[4]);
  }
  if (t.needs[5]) {
    for_each_unit(heads, 0, [&](int64_t unit, void*) {
      kernels.sink_gradient_t(params, of_heads.data(), unit);
    });
    sum_over_batch(of_heads, t.x, t.grads[5]);
  }
}

template <class T>
void run_backward_backward(const Tensors& t, Workspace& workspace) {
  kernels::SecondOrderParams<T> params{};
  kernels::JvpParams<T>& jvp = params.jvp;
  kernels::BackwardBackwardParams<T>& second = params.second;
  kernels::BackwardParams<T>& backward = second.backward;
  BatchDimensions batch(t.x.query.sizes().slice(0, t.x.query.dim() - 3));
  describe(backward.problem, t.x, batch);
  describe(second.directions, t.cotangents, batch);
  describe(backward.grad_out, t.grad_out, batch);
  describe(backward.out, t.out, batch);
  describe(second.out_t, t.out_t, batch);
  describe(jvp.out_t, t.out_t, batch);
  if (t.needs[0]) describe(backward.grad_query, t.grads[0], batch);
  if (t.needs[1]) describe(backward.grad_key, t.grads[1], batch);
  if (t.needs[2]) describe(backward.grad_value, t.grads[2], batch);
  if (t.needs[3] && t.x.key.size(-2) > 0) describe(backward.grad_mask, t.grads[3], batch);
  batch.complete(backward.problem);
  backward.lse = static_cast<const T*>(t.lse.const_data_ptr());
  backward.lse_rest = static_cast<const T*>(t.lse_rest.const_data_ptr());
  backward.grad_lse = t.grad_lse ? static_cast<const T*>(t.grad_lse->const_data_ptr()) : nullptr;
  second.lse_t = static_cast<const T*>(t.lse_t.const_data_ptr());

  const auto& kernels = kernels_for(backward.problem);
  const kernels::TangentKernels<T>& tangents = tangent_kernels_for(backward.problem);
  const bool owns_mask = tangents.mask_gradient_t != nullptr;
  const kernels::TangentKernels<T>& of_mask = owns_mask ? tangents : kernels;
  const bool in_16_bits = &tangents != &kernels;
  const T* const lse_of_forward = backward.lse;
  const T* const rest_of_forward = backward.lse_rest;
  const LseOfDerivatives<T> lse(in_16_bits, backward.problem, lse_of_forward, rest_of_forward);
  lse.set_lse(backward);

  jvp.problem = backward.problem;
  jvp.directions = second.directions;
  jvp.out = backward.out;
  jvp.lse = backward.lse;
  jvp.lse_rest = backward.lse_rest;
  jvp.lse_t = static_cast<T*>(t.lse_t.data_ptr());
  jvp.takes_means = true;  // what lse' lacks is multiplied with keys
  const kernels::Problem<T>& p = backward.problem;
  const auto slope_gradient =
      c10::GetCPUAllocator()->allocate(t.needs[4] ? t.lse.numel() * sizeof(T) : 0);
  backward.slope_gradient_of_rows = t.needs[4] ? static_cast<T*>(slope_gradient.get()) : nullptr;
  backward.splits = backward.units = 1;  // of the keys
  // Of sizes of a head alone, as the bits depend on it. Not more: each has a buffer for gradients
  // of all keys and values.
  params.splits = std::clamp<int64_t>(p.query_heads / p.kv_heads * p.queries / 256, 1, 4);
  const auto prepared = prepare_heads(
      p, tangents.second_order_prepared_bytes(params),
      [&](int64_t head, void* to) { tangents.prepare_second_order(params, head, to); });
  params.prepared = prepared.get();

  // As in the backward: the mask's gradient may have a pass with other scores.
  kernels::BackwardBackwardParams<T> for_mask = second;
  std::optional<LseOfDerivatives<T>> lse_of_numbers;
  if (t.needs[3] && in_16_bits && !owns_mask) {
    lse_of_numbers.emplace(false, p, lse_of_forward, rest_of_forward);
    lse_of_numbers->set_lse(for_mask.backward);
  }
  SplitPass<T, kernels::SecondOrderParams<T>> splits{};
  splits.what = Split::kRows;
  splits.units = params.splits;
  splits.scratch_bytes = tangents.second_order_scratch_bytes(params);
  splits.run = tangents.second_order;
  splits.needed = true;
  splits.add_to_mask = owns_mask;
  splits.sums = params.splits > 1 && (t.needs[1] || t.needs[2]);
  splits.partial = [](kernels::SecondOrderParams<T>& x) -> T*& { return x.partial; };
  splits.partial_size = tangents.second_order_partial_size(params);
  splits.sum_units = tangents.sum_keys_units(params);
  splits.sum = tangents.sum_keys;
  run_gradients<T, kernels::SecondOrderParams<T>>(
      backward, params, splits,
      {kernels.mask_gradient_units, of_mask.mask_gradient_t_scratch_bytes(second),
       [&](int64_t unit, void* scratch) { of_mask.mask_gradient_t(for_mask, unit, scratch); }},
      workspace);
  if (t.needs[4] || t.needs[5]) run_heads(second, t);
}

TensorTuple<8> attention_backward_backward(const Operands& x, const Tensor& grad_out,
                                           const OptionalTensor& grad_lse,
                                           const ForwardResults& forward,
                                           const Tangents& cotangents, NeedsOfSecond needs) {
  check_backward_backward(kBackwardBackwardOp, x, grad_out, grad_lse, forward, cotangents, needs);
  check_batch_dimensions(kBackwardBackwardOp, x);
  const GradientsOfSecond results = empty_gradients_of_second(x, grad_out, needs);
  if (forward.lse.numel() == 0) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }

  const auto real = forward.lse.scalar_type();
  const Tangents along = merging_as(x, cotangents);
  const Tensor incoming = merging_as(forward.out, grad_out);
  const Gradients grads = of_operands(results);
  const Needs needs_of_operands = of_operands(needs);
  Workspace workspace;
  for (const Heads& heads : ranges_of_heads(x, needs_of_operands)) {
    Tensors t;
    t.needs = needs_of_operands;
    t.x = readable(heads.of(x), real);
    t.cotangents = readable(heads.of(along), real);
    t.grad_out = in_rows(heads.of_rows(incoming));
    if (grad_lse) t.grad_lse = heads.of_scalars(*grad_lse);
    t.out = exact_output(heads.of_rows(forward.out), heads.of_rows(forward.out_rest), real);
    t.lse = heads.of_scalars(forward.lse);
    t.lse_rest = heads.of_scalars(forward.lse_rest);
    const Tensor to_out_t = needs[0] ? heads.of_rows(results[0]) : Tensor();
    // Laid out as the output, batch dimensions merge as before.
    const bool in_place =
        needs[0] && to_out_t.scalar_type() == real && to_out_t.strides() == t.out.strides();
    t.out_t = in_place ? to_out_t : at::empty_like(t.out);
    t.lse_t = at::empty_like(t.lse);
    const Gradients to = heads.of(grads, t.needs);
    t.grads = rows_of(to);
    // As in the backward: a sum over heads is rounded once.
    if (t.needs[3]) t.grads[3] = sums_of_mask(to[3], real);
    if (x.key.size(-2) == 0) {
      for (size_t i = 0; i < 5; ++i) t.grads[i].zero_();
    }
    if (real == at::kDouble) {
      run_backward_backward<double>(t, workspace);
    } else {
      run_backward_backward<float>(t, workspace);
    }
    if (needs[0]) put(t.out_t, to_out_t);
    if (needs[1]) heads.put_scalars(t.lse_t, results[1]);
    put(t.grads, to);
  }
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv::cpu
