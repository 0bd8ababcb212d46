// The derivative of _attention_weights: in reverse mode _attention_weights_backward. For what goes
// beyond, the weights are the gradient of logsumexp with respect to an additive mask (batch.., Hq,
// M, N), whatever that is,
//
//     lse_i = log sum_j exp(S_ij + mask_ij)        d lse_i / d mask_ij = weights_ij
//
// which _attention_backward computes for grad_logsumexp = 1 and values without columns. So the
// tangents of weights are what _attention_backward_backward gives for those of the operands, as the
// Hessian of logsumexp is symmetric; and _attention_weights_backward is what it gives for a
// cotangent of the mask's gradient, so that their second order is its derivative, third order by
// formulas.

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "autograd/operands_node.h"
#include "autograd/third_order.h"
#include "layout.h"
#include "reference.h"

namespace qkv::autograd {

namespace {

/// That backward's arguments.
struct BackwardOfLogsumexp {
  Operands x;
  Tensor grad_out;
  Tensor grad_lse;
  ForwardResults forward;

  BackwardOfLogsumexp(const Operands& operands, const Tensor& lse, const Tensor& lse_rest)
      : x(operands), grad_lse(at::ones_like(lse)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    auto sizes = x.query.sym_sizes().vec();
    sizes.back() = 0;
    grad_out = at::empty_symint(sizes, x.query.options());
    forward = {grad_out, lse, grad_out, lse_rest};
    // In the dtype of sums: its gradient may be summed to that of a smaller mask, and rounded then.
    Tensor mask = at::zeros({}, lse.options());
    if (x.attn_mask) {
      mask = x.attn_mask->scalar_type() == at::kBool
                 ? mask.masked_fill(x.attn_mask->logical_not(), -kInfinity)
                 : x.attn_mask->to(real());
    }
    x.attn_mask = mask.expand_symint(weights_sizes(x));
  }

  at::ScalarType real() const { return grad_lse.scalar_type(); }
};

struct QkvAttentionWeightsBackward : OperandsNode<QkvAttentionWeightsBackward> {
  static constexpr size_t kGradients = Operands::kDifferentiable;
  static constexpr size_t kOutputs = 0;

  std::string name() const override { return "QkvAttentionWeightsBackward"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& others,
                                 const std::vector<bool>& needs) {
    return only_needed(as_array(attention_weights_backward_op()(x, grads[0], others[0], others[1],
                                                                needs_of<kGradients>(needs))),
                       needs);
  }
};

/// Of weights, for tangents t of the operands.
Tensor weights_tangent(const Operands& x, const Tensor& lse, const Tensor& lse_rest, Tangents t) {
  const BackwardOfLogsumexp b(x, lse, lse_rest);
  if (t[3]) t[3] = t[3]->to(b.real()).expand_symint(b.x.attn_mask->sym_sizes());
  NeedsOfSecond of_mask = {};
  of_mask[2 + 3] = true;
  const auto moved = as_array(
      attention_backward_backward_op()(b.x, b.grad_out, b.grad_lse, b.forward, t, of_mask));
  return moved[2 + 3].to(x.query.scalar_type());
}

TensorTuple<3> attention_weights(c10::DispatchKeySet keys, const Operands& x) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionWeightsBackward> node;
  const variable_list inputs = variables(x);
  if (compute_requires_grad(at::TensorList(inputs))) {
    node = make_node<QkvAttentionWeightsBackward>();
    node->set_next_edges(collect_next_edges(at::TensorList(inputs)));
    node->save_operands(x);
  }
  Tensor weights, lse, lse_rest;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(weights, lse, lse_rest) =
        attention_weights_op().redispatch(keys & c10::after_autograd_keyset, x);
  }
  if (node) {
    set_history({weights}, node);
    node->save(lse, /*is_output=*/false);
    node->save(lse_rest, /*is_output=*/false);
  }
  const Tangents t = tangents(x);
  if (any(t)) set_tangent(weights, weights_tangent(primal(x), lse, lse_rest, t));
  return {weights, lse, lse_rest};
}

/// The gradient of a mask of the weights' sizes as that of x's own mask.
Tensor as_own_mask(const Operands& x, const Tensor& grad) {
  return at::sum_to(grad, x.attn_mask->sym_sizes()).to(x.attn_mask->scalar_type());
}

struct QkvAttentionWeightsSecondOrder : OperandsNode<QkvAttentionWeightsSecondOrder> {
  static constexpr size_t kGradients = Operands::kDifferentiable + 1;  // grad_weights last
  static constexpr size_t kOutputs = 0;

  std::string name() const override { return "QkvAttentionWeightsSecondOrder"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& others,
                                 const std::vector<bool>& needs) {
    constexpr size_t kMask = 2 + 3, kCotangents = 2 + Operands::kDifferentiable;
    const BackwardOfLogsumexp b(x, others[1], others[2]);
    variable_list of_results(2), arguments = {b.grad_out, b.grad_lse};
    of_results.insert(of_results.end(), grads.begin(), grads.end());
    if (Tensor& grad = of_results[kMask]; grad.defined()) {
      grad = grad.to(b.real()).expand_symint(b.x.attn_mask->sym_sizes());
    }
    arguments.resize(kCotangents);
    arguments[kMask] = others[0].to(b.real());
    std::vector<bool> needed(kCotangents + Operands::kDifferentiable);
    std::copy_n(needs.begin(), Operands::kDifferentiable, needed.begin() + 2);
    needed[kCotangents + 3] = needs.back();

    const variable_list found = third_order(of_results, b.x, arguments, needed);
    variable_list result(found.begin() + 2, found.begin() + kCotangents);
    if (result[3].defined()) result[3] = as_own_mask(x, result[3]);
    result.push_back(found[kCotangents + 3]);
    if (result.back().defined()) result.back() = result.back().to(others[0].scalar_type());
    return result;
  }
};

TensorTuple<6> attention_weights_backward(c10::DispatchKeySet keys, const Operands& x,
                                          const Tensor& grad_weights, const Tensor& lse,
                                          const Tensor& lse_rest, Needs needs) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionWeightsSecondOrder> node;
  variable_list inputs = variables(x);
  inputs.push_back(grad_weights);
  if (compute_requires_grad(at::TensorList(inputs))) {
    node = make_node<QkvAttentionWeightsSecondOrder>();
    node->set_next_edges(collect_next_edges(at::TensorList(inputs)));
    node->save_operands(x);
    node->save(grad_weights, /*is_output=*/false);
    node->save_constant(lse);
    node->save_constant(lse_rest);
  }
  Gradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = as_array(attention_weights_backward_op().redispatch(
        keys & c10::after_autograd_keyset, x, grad_weights, lse, lse_rest, needs));
  }
  if (node) set_history(variable_list(grads.begin(), grads.end()), node);
  if (any_tangent(inputs)) {
    const BackwardOfLogsumexp b(x, lse, lse_rest);
    Tangents cotangents;
    cotangents[3] = grad_weights.to(b.real());
    NeedsOfSecond of_second = {};  // neither of grad_out nor of grad_lse
    std::copy(needs.begin(), needs.end(), of_second.begin() + 2);
    Gradients moved = of_operands(as_array(reference::attention_backward_backward(
        b.x, b.grad_out, b.grad_lse, cotangents, of_second)));
    if (needs[3]) moved[3] = as_own_mask(x, moved[3]);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (needs[i]) set_tangent(grads[i], tangent(moved[i]));
    }
  }
  return std::tuple_cat(grads);
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  m.impl("_attention_weights", flat<&attention_weights>);
  m.impl("_attention_weights_backward", flat<&attention_weights_backward>);
}

}  // namespace

}  // namespace qkv::autograd
