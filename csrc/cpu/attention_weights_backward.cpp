// _attention_weights_backward on CPU. With dW the gradient of the weights W,
//
//     dS_ij = W_ij · (dW_ij - delta_i)          delta_i = sum_j W_ij dW_ij
//
// which is the backward of an attention whose values have no columns, with dW in the place of dP
// and -delta as the gradient of logsumexp.

#include <torch/library.h>

#include "checks.h"
#include "cpu/backward_pass.h"
#include "cpu/readable.h"
#include "cpu/weights_pass.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run_weights_backward(const Operands& x, const Tensor& grad_weights, const Tensor& lse,
                          const Tensor& lse_rest, const Gradients& grads, const Needs& needs) {
  const Tensor minus_delta = at::empty_like(lse);
  kernels::BackwardParams<T> backward{};
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(backward.problem, x, batch);
  describe(backward.grad_weights, grad_weights, batch);
  if (needs[0]) describe(backward.grad_query, grads[0], batch);
  if (needs[1]) describe(backward.grad_key, grads[1], batch);
  if (needs[3]) describe(backward.grad_mask, grads[3], batch);
  batch.complete(backward.problem);
  backward.lse = static_cast<const T*>(lse.const_data_ptr());
  backward.lse_rest = static_cast<const T*>(lse_rest.const_data_ptr());

  backward.minus_dots = static_cast<T*>(minus_delta.data_ptr());
  backward.grad_lse = backward.minus_dots;
  if (!makes_minus_dots(backward_kernels_of_rows_for(backward.problem), backward.problem)) {
    kernels::WeightsParams<T> weights{};
    weights.forward.problem = backward.problem;
    weights.grad = backward.grad_weights;
    weights.dots = backward.minus_dots;
    weights_pass(weights);
    minus_delta.neg_();
  }
  backward_pass(backward, x, grads, needs);
}

TensorTuple<6> attention_weights_backward(const Operands& operands, const Tensor& grad_weights,
                                          const Tensor& lse, const Tensor& lse_rest, Needs needs) {
  check_weights_backward(kWeightsBackwardOp, operands, grad_weights, lse, lse_rest, needs);
  check_batch_dimensions(kWeightsBackwardOp, operands);
  const Gradients results = empty_gradients(operands, needs);
  if (grad_weights.numel() == 0) {
    for (const Tensor& grad : results) grad.zero_();
    return std::tuple_cat(results);
  }
  const auto real = lse.scalar_type();
  const Operands x = readable(operands, real);
  Gradients grads = rows_of(results);
  // A sum over heads is rounded once.
  if (needs[3]) grads[3] = sums_of_mask(results[3], real);
  const bool is_double = real == at::kDouble;
  const auto run = is_double ? &run_weights_backward<double> : &run_weights_backward<float>;
  const Tensor incoming = in_rows(merging_as(operands.query, grad_weights));
  run(x, incoming, lse.contiguous(), lse_rest.contiguous(), grads, needs);
  put(grads, results);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  m.impl("_attention_weights_backward", flat<&attention_weights_backward>);
}

}  // namespace

}  // namespace qkv::cpu
