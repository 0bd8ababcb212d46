// _attention_backward on CUDA: tensors to Params, and a launch for each kind of gradient.

#include <torch/library.h>

#include "checks.h"
#include "cuda/gradients.h"
#include "cuda/lse_of_tiles.h"
#include "cuda/operands.h"
#include "kernels/cuda/simt/tasks.h"
#include "layout.h"

namespace qkv::cuda {

namespace {

template <class T>
void run_backward(const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse,
                  const Tensor& out, const Tensor& lse, const Tensor& out_rest,
                  const Tensor& lse_rest, const Gradients& grads, const Needs& needs) {
  kernels::simt::BackwardTask<T> task{};
  kernels::BackwardParams<T>& params = task.backward;
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.grad_out, grad_out, batch);
  describe(params.out, out, batch);
  if (has_16_bits(out)) describe(task.out_rest, out_rest, batch);
  if (needs[0]) describe(params.grad_query, grads[0], batch);
  if (needs[1]) describe(params.grad_key, grads[1], batch);
  if (needs[2]) describe(params.grad_value, grads[2], batch);
  if (needs[3]) describe(task.grad_mask, grads[3], batch);
  batch.complete(params.problem);
  params.grad_lse = grad_lse ? static_cast<const T*>(grad_lse->const_data_ptr()) : nullptr;
  const SumsOfRows<T> sums(lse, needs, task);

  const Stream stream(x.query);
  const LseOfTiles<T> of_tiles(kBackwardOp, params.problem, lse, lse_rest, stream);
  of_tiles.tell(params);
  check(kBackwardOp, kernels::simt::attention_backward(task, stream.get()));
  sums.put(grads);
}

TensorTuple<6> attention_backward(const Operands& operands, const Tensor& grad_out,
                                  const OptionalTensor& grad_lse, const Tensor& out,
                                  const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
                                  Needs needs) {
  check_backward(kBackwardOp, operands, grad_out, grad_lse, out, lse, out_rest, lse_rest, needs);
  check_batch_dimensions(kBackwardOp, operands);
  const Gradients results = empty_gradients(operands, needs);
  const bool nothing_attends = lse.numel() == 0 || operands.key.size(-2) == 0;
  if (nothing_attends && !(needs[5] && lse.numel() > 0)) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }

  const auto real = lse.scalar_type();
  Gradients grads = results;
  if (needs[3]) grads[3] = writable(results[3], real);  // summed in memory, rounded once
  OptionalTensor dense_grad_lse;
  if (grad_lse) dense_grad_lse = grad_lse->contiguous();
  const auto run_in = real == at::kDouble ? &run_backward<double> : &run_backward<float>;
  run_in(readable(operands, real), with_unit_columns(merging_as(out, grad_out)), dense_grad_lse,
         with_unit_columns(out), lse.contiguous(), with_unit_columns(out_rest),
         lse_rest.contiguous(), grads, needs);
  if (!grads[3].is_same(results[3])) results[3].copy_(grads[3]);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) {
  m.impl("_attention_backward", flat<&attention_backward>);
}

}  // namespace

}  // namespace qkv::cuda
