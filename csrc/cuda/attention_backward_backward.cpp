// _attention_backward_backward on CUDA: tensors to Params; the jvp along the cotangents, then a
// launch for each kind of gradient.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"
#include "cuda/gradients.h"
#include "cuda/lse_of_tiles.h"
#include "cuda/readable.h"
#include "internal_op.h"
#include "kernels/cuda/simt/tasks.h"
#include "layout.h"

namespace qkv::cuda {

namespace {

/// The tensors that the kernels read and write.
struct Tensors {
  Operands x;
  Tangents cotangents;
  Tensor grad_out;
  OptionalTensor grad_lse;
  ForwardResults forward;
  Tensor out_t, lse_t, out_t_rest;  // the first two are also the gradients of grad_out, grad_lse
  Gradients grads;
  Needs needs;
};

template <class T>
void run_backward_backward(const Tensors& t) {
  kernels::simt::BackwardBackwardTask<T> task{};
  kernels::simt::JvpTask<T> jvp{};
  kernels::BackwardParams<T>& params = task.backward.backward;
  BatchDimensions batch(t.x.query.sizes().slice(0, t.x.query.dim() - 3));
  describe(params.problem, t.x, batch);
  describe(task.directions, t.cotangents, batch);
  describe(params.grad_out, t.grad_out, batch);
  describe(params.out, t.forward.out, batch);
  describe(task.out_t, t.out_t, batch);
  describe(jvp.jvp.out_t, t.out_t, batch);
  if (has_16_bits(t.forward.out)) {
    describe(params.out_rest, t.forward.out_rest, batch);
    describe(task.out_t_rest, t.out_t_rest, batch);
    describe(jvp.out_t_rest, t.out_t_rest, batch);
  }
  if (t.needs[0]) describe(params.grad_query, t.grads[0], batch);
  if (t.needs[1]) describe(params.grad_key, t.grads[1], batch);
  if (t.needs[2]) describe(params.grad_value, t.grads[2], batch);
  if (t.needs[3]) describe(params.grad_mask, t.grads[3], batch);
  batch.complete(params.problem);
  params.grad_lse = t.grad_lse ? static_cast<const T*>(t.grad_lse->const_data_ptr()) : nullptr;
  task.lse_t = static_cast<const T*>(t.lse_t.const_data_ptr());

  jvp.jvp.problem = params.problem;
  jvp.jvp.directions = task.directions;
  jvp.jvp.out = params.out;
  jvp.jvp.lse_t = static_cast<T*>(t.lse_t.data_ptr());
  jvp.out_rest = params.out_rest;

  const Stream stream(t.x.query);
  const LseOfTiles<T> of_tiles(kBackwardBackwardOp, params.problem, t.forward, stream);
  of_tiles.set_lse(params);
  of_tiles.set_lse(jvp.jvp);
  check(kBackwardBackwardOp, kernels::simt::attention_jvp(jvp, stream.get()));
  if (std::none_of(t.needs.begin(), t.needs.end(), [](bool need) { return need; })) return;
  const SumsOfRows<T> sums(t.lse_t, t.needs, task.backward);
  const Tensor delta_t = at::empty_like(t.lse_t);
  task.delta_t = static_cast<T*>(delta_t.data_ptr());
  check(kBackwardBackwardOp, kernels::simt::attention_backward_backward(task, stream.get()));
  sums.put(t.grads);
}

TensorTuple<8> attention_backward_backward(const Operands& x, const Tensor& grad_out,
                                           const OptionalTensor& grad_lse,
                                           const ForwardResults& forward,
                                           const Tangents& cotangents, NeedsOfSecond needs) {
  check_backward_backward(kBackwardBackwardOp, x, grad_out, grad_lse, forward, cotangents, needs);
  check_batch_dimensions(kBackwardBackwardOp, x);
  const std::array<Tensor, 8> results = empty_gradients_of_second(x, grad_out, needs);
  if (forward.lse.numel() == 0) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }

  const auto real = forward.lse.scalar_type();
  Tensors t;
  t.x = readable(x, real);
  t.cotangents = readable(merging_as(x, cotangents), real);
  t.grad_out = with_unit_columns(merging_as(forward.out, grad_out));
  if (grad_lse) t.grad_lse = grad_lse->contiguous();
  t.forward = readable(forward);
  t.out_t = at::empty_like(t.forward.out);
  t.out_t_rest = at::empty_like(t.forward.out_rest);
  t.lse_t = needs[1] ? results[1] : at::empty_like(t.forward.lse);
  t.grads = of_operands(results);
  t.needs = of_operands(needs);
  if (t.needs[3]) t.grads[3] = writable(results[5], real);  // summed in memory, rounded once
  const auto run_in =
      real == at::kDouble ? &run_backward_backward<double> : &run_backward_backward<float>;
  run_in(t);
  if (needs[0]) results[0].copy_(t.out_t);
  if (!t.grads[3].is_same(results[5])) results[5].copy_(t.grads[3]);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv::cuda
