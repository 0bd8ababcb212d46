// _attention_backward on CUDA: tensors to Params, and a launch for each kind of gradient, after
// one for the lse where the forward's is of other scores.

#include <torch/library.h>

#include "checks.h"
#include "cuda/gradients.h"
#include "cuda/lse_of_tiles.h"
#include "cuda/readable.h"
#include "internal_op.h"
#include "kernels/cuda/simt/tasks.h"
#include "kernels/cuda/sm80/tasks.h"
#include "layout.h"

namespace qkv::cuda {

namespace {

template <class T>
int run_for_any_device(kernels::simt::BackwardTask<T>& task, const ForwardResults& forward,
                       const Stream& stream) {
  const LseOfTiles<T> of_tiles(kBackwardOp, task.backward.problem, forward, stream);
  of_tiles.set_lse(task.backward);
  return kernels::simt::attention_backward(task, stream.get());
}

int run_kernels(kernels::simt::BackwardTask<double>& task, const ForwardResults& forward,
                const Stream& stream) {
  return run_for_any_device(task, forward, stream);
}

/// On tensor cores the gradients of query, key and value, the others always for any device.
int run_kernels(kernels::simt::BackwardTask<float>& task, const ForwardResults& forward,
                const Stream& stream) {
  if (!kernels::sm80::takes_backward(task.backward.problem)) {
    return run_for_any_device(task, forward, stream);
  }
  task.backward.lse = static_cast<const float*>(forward.lse.const_data_ptr());
  task.backward.lse_rest = static_cast<const float*>(forward.lse_rest.const_data_ptr());
  int error = kernels::simt::row_deltas(task, stream.get());
  if (error == 0) error = kernels::sm80::attention_backward(task, stream.get());
  if (error != 0) return error;
  if (task.backward.grad_mask.data == nullptr)
    return kernels::simt::option_gradients(task, stream.get());
  const LseOfTiles<float> of_tiles(kBackwardOp, task.backward.problem, forward, stream);
  of_tiles.set_lse(task.backward);
  return kernels::simt::option_gradients(task, stream.get());
}

template <class T>
void run_backward(const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse,
                  const ForwardResults& forward, const Gradients& grads, const Needs& needs) {
  kernels::simt::BackwardTask<T> task{};
  kernels::BackwardParams<T>& params = task.backward;
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.grad_out, grad_out, batch);
  describe(params.out, forward.out, batch);
  if (has_16_bits(forward.out)) describe(params.out_rest, forward.out_rest, batch);
  if (needs[0]) describe(params.grad_query, grads[0], batch);
  if (needs[1]) describe(params.grad_key, grads[1], batch);
  if (needs[2]) describe(params.grad_value, grads[2], batch);
  if (needs[3]) describe(params.grad_mask, grads[3], batch);
  batch.complete(params.problem);
  params.grad_lse = grad_lse ? static_cast<const T*>(grad_lse->const_data_ptr()) : nullptr;
  const SumsOfRows<T> sums(forward.lse, needs, task);

  const Stream stream(x.query);
  check(kBackwardOp, run_kernels(task, forward, stream));
  sums.put(grads);
}

TensorTuple<6> attention_backward(const Operands& operands, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const ForwardResults& forward,
                                  Needs needs) {
  check_backward(kBackwardOp, operands, grad_out, grad_lse, forward, needs);
  check_batch_dimensions(kBackwardOp, operands);
  const Gradients results = empty_gradients(operands, needs);
  const bool has_rows = forward.lse.numel() > 0;
  const bool nothing_attends = !has_rows || operands.key.size(-2) == 0;
  if (nothing_attends && !(needs[5] && has_rows)) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }

  const auto real = forward.lse.scalar_type();
  Gradients grads = results;
  if (needs[3]) grads[3] = writable(results[3], real);  // summed in memory, rounded once
  OptionalTensor dense_grad_lse;
  if (grad_lse) dense_grad_lse = grad_lse->contiguous();
  const auto run_in = real == at::kDouble ? &run_backward<double> : &run_backward<float>;
  run_in(readable(operands, real), with_unit_columns(merging_as(forward.out, grad_out)),
         dense_grad_lse, readable(forward), grads, needs);
  if (!grads[3].is_same(results[3])) results[3].copy_(grads[3]);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) {
  m.impl("_attention_backward", flat<&attention_backward>);
}

}  // namespace

}  // namespace qkv::cuda
