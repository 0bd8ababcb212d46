// The derivative of _attention_backward, a function of grad_output, grad_logsumexp and the
// operands (output and logsumexp are functions of those, not variables): in reverse mode
// _attention_backward_backward.
//
// In forward mode no further formula is needed. With L = <grad_out, out> + <grad_lse, lse>, the
// backward is the gradient of L, so its directional derivative along tangents of the operands is
// their product with the Hessian of L; that is symmetric, hence also what the double backward
// gives for cotangents equal to those tangents. And it is linear in grad_out and grad_lse.

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd/operands_node.h"

namespace qkv::autograd {

namespace {

struct QkvAttentionBackwardBackward : OperandsNode<QkvAttentionBackwardBackward> {
  static constexpr size_t kGradients = Operands::kDifferentiable + 2;  // grad_out, grad_lse first
  static constexpr size_t kOutputs = 0;

  std::string name() const override { return "QkvAttentionBackwardBackward"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& others,
                                 const std::vector<bool>& needs) {
    return only_needed(
        as_array(attention_backward_backward_op()(
            x, others[0], optional(others[1]), {others[2], others[3], others[4], others[5]},
            optional_tangents(grads.data()), needs_of<kGradients>(needs))),
        needs);
  }
};

/// Tangents of the gradients.
Tangents gradient_tangents(const Operands& x, const Tensor& grad_out,
                           const OptionalTensor& grad_lse, const ForwardResults& forward,
                           Needs needs) {
  Tangents result;
  const auto add = [&](size_t i, const Tensor& t) {
    if (needs[i]) result[i] = result[i] ? result[i]->add(t) : t;
  };
  const Tangents t = tangents(x);
  if (any(t)) {
    const auto moved = as_array(attention_backward_backward_op()(
        primal(x), primal(grad_out), primal(grad_lse), primal(forward), t,
        {false, false, needs[0], needs[1], needs[2], needs[3], needs[4], needs[5]}));
    for (size_t i = 0; i < needs.size(); ++i) add(i, moved[i + 2]);
  }
  const OptionalTensor grad_out_t = tangent(grad_out), grad_lse_t = tangent(grad_lse);
  if (grad_out_t || grad_lse_t) {
    const Tensor moved_out = grad_out_t ? *grad_out_t : at::zeros_like(primal(grad_out));
    const auto moved =
        as_array(attention_backward_op()(primal(x), moved_out, grad_lse_t, primal(forward), needs));
    for (size_t i = 0; i < needs.size(); ++i) add(i, moved[i]);
  }
  return result;
}

TensorTuple<6> attention_backward(c10::DispatchKeySet keys, const Operands& x,
                                  const Tensor& grad_out, const OptionalTensor& grad_lse,
                                  const ForwardResults& forward, Needs needs) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionBackwardBackward> node;
  variable_list inputs = variables(x);
  inputs.insert(inputs.begin(), {grad_out, grad_lse.value_or(Tensor())});
  if (compute_requires_grad(at::TensorList(inputs))) {
    node = make_node<QkvAttentionBackwardBackward>();
    node->set_next_edges(collect_next_edges(at::TensorList(inputs)));
    node->save_operands(x);
    node->save(grad_out, /*is_output=*/false);
    node->save(grad_lse, /*is_output=*/false);
    for (const Tensor& result : forward.tensors()) node->save_constant(result);
  }
  Gradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = as_array(attention_backward_op().redispatch(keys & c10::after_autograd_keyset, x,
                                                        grad_out, grad_lse, forward, needs));
  }
  if (node) set_history(variable_list(grads.begin(), grads.end()), node);
  const Tangents moved = gradient_tangents(x, grad_out, grad_lse, forward, needs);
  for (size_t i = 0; i < grads.size(); ++i) {
    set_tangent(grads[i], moved[i]);
  }
  return std::tuple_cat(grads);
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv::autograd
