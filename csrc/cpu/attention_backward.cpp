// _attention_backward on CPU: tensors to Params, and parallel loops (backward_pass.h).

#include <torch/library.h>

#include "checks.h"
#include "cpu/backward_pass.h"
#include "cpu/readable.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run_backward(const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse,
                  const ForwardResults& forward, const Gradients& grads, const Needs& needs) {
  kernels::BackwardParams<T> backward{};
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(backward.problem, x, batch);
  describe(backward.grad_out, grad_out, batch);
  describe(backward.out, forward.out, batch);
  if (has_16_bits(forward.out)) describe(backward.out_rest, forward.out_rest, batch);
  if (needs[0]) describe(backward.grad_query, grads[0], batch);
  if (needs[1]) describe(backward.grad_key, grads[1], batch);
  if (needs[2]) describe(backward.grad_value, grads[2], batch);
  if (needs[3]) describe(backward.grad_mask, grads[3], batch);
  batch.complete(backward.problem);
  backward.lse = static_cast<const T*>(forward.lse.const_data_ptr());
  backward.lse_rest = static_cast<const T*>(forward.lse_rest.const_data_ptr());
  backward.grad_lse = grad_lse ? static_cast<const T*>(grad_lse->const_data_ptr()) : nullptr;

  backward_pass(backward, x, grads, needs);
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
  const Tensor incoming = in_rows(merging_as(forward.out, grad_out));
  const Operands x = readable(operands, real);
  const ForwardResults of_forward = readable(forward);
  OptionalTensor dense_grad_lse;
  if (grad_lse) dense_grad_lse = grad_lse->contiguous();
  Gradients grads = rows_of(results);
  // A sum over heads is rounded once.
  if (needs[3]) grads[3] = sums_of_mask(results[3], real);
  if (real == at::kDouble) {
    run_backward<double>(x, incoming, dense_grad_lse, of_forward, grads, needs);
  } else {
    run_backward<float>(x, incoming, dense_grad_lse, of_forward, grads, needs);
  }
  put(grads, results);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv::cpu
