// The derivative of _attention_backward_backward: third order, by differentiating the reference
// formulas, which have memory for all scores. This is done only when such a derivative is asked
// for; that it might be, as always under torch.func, costs nothing.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "autograd/operands_node.h"
#include "autograd/third_order.h"
#include "environment.h"
#include "reference.h"
#include "vmap/batched.h"

namespace qkv::autograd {

namespace {

void report_third_order() {
  report_fallback("qkv::attention", "third derivatives have no fused kernel");
}

vmap::Level level_of(const variable_list& grads, const Operands& x,
                     const std::vector<Tensor>& others) {
  return vmap::Level(x, optional(others[0]), optional(others[1]), optional_tangents(&others[2]),
                     optional(grads[0]), optional(grads[1]), optional_tangents(&grads[2]));
}

/// Nothing that is done with tensors of vmap is recorded, where the level of the grad or vjp
/// inside of it has ended: as in vmap/, the mapped dimension becomes one more batch dimension.
variable_list third_order_of_mapped(const vmap::Level& level, const variable_list& grads,
                                    const Operands& x, const std::vector<Tensor>& others,
                                    const std::vector<bool>& needs) {
  Needs all;
  all.fill(true);
  const auto unwrap = [&](const variable_list& on_level) {
    variable_list off;
    for (size_t i = 0; i < 2; ++i) {
      off.push_back(level.in_front(optional(on_level[i])).value_or(Tensor()));
    }
    for (const auto& t : level.unwrap(x, optional_tangents(&on_level[2]), all)) {
      off.push_back(t.value_or(Tensor()));
    }
    return off;
  };
  variable_list found = third_order(unwrap(grads), level.unwrap(x, all), unwrap(others), needs);
  variable_list inputs = variables(x);
  inputs.insert(inputs.begin(), others.begin(), others.begin() + 2);
  inputs.insert(inputs.end(), others.begin() + 2, others.end());
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i].defined()) found[i] = level.wrap_gradient(found[i], inputs[i]);
  }
  return found;
}

}  // namespace

variable_list third_order(const variable_list& grads, const Operands& x,
                          const std::vector<Tensor>& others, const std::vector<bool>& needs) {
  const vmap::Level level = level_of(grads, x, others);
  if (level.any()) return third_order_of_mapped(level, grads, x, others, needs);
  // As it is in the formulas themselves.
  const c10::impl::ExcludeDispatchKeyGuard autocast_off(c10::autocast_dispatch_keyset);
  const bool graph_is_asked_for = at::GradMode::is_enabled();
  at::AutoGradMode grad_mode(true);
  bool something_varies = false;
  for (const Tensor& grad : grads) something_varies |= grad.defined() && grad.requires_grad();
  // The same tensor may be given twice; each place gets an alias with a gradient of its own.
  variable_list wanted;
  size_t place = 0;
  const auto variable = [&](const OptionalTensor& input) -> OptionalTensor {
    const bool needed = needs[place++];
    if (!input || !input->defined()) return input;
    Tensor alias = at::alias(*input);
    something_varies |= alias.requires_grad();
    if (!needed) return alias;
    // When its torch.func level has ended, a tensor is that of the level outside, where it may be
    // a constant.
    if (!alias.requires_grad()) alias.requires_grad_();
    wanted.push_back(alias);
    return alias;
  };
  const Tensor grad_out = *variable(others[0]);
  const OptionalTensor grad_lse = variable(optional(others[1]));
  auto tensors = x.tensors();
  for (size_t i = 0; i < Operands::kDifferentiable; ++i) tensors[i] = variable(tensors[i]);
  Tangents cotangents = optional_tangents(others.data() + 2);
  for (OptionalTensor& cotangent : cotangents) cotangent = variable(cotangent);

  NeedsOfSecond given;
  for (size_t i = 0; i < given.size(); ++i) given[i] = grads[i].defined();
  const auto results = as_array(reference::attention_backward_backward(
      x.with(tensors), grad_out, grad_lse, cotangents, given));
  variable_list outputs, incoming;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i] || !results[i].requires_grad()) continue;
    outputs.push_back(results[i]);
    incoming.push_back(grads[i]);
  }
  variable_list found(wanted.size());
  if (!outputs.empty()) {
    const bool create_graph = graph_is_asked_for && something_varies;
    found = torch::autograd::grad(outputs, wanted, incoming, create_graph, create_graph,
                                  /*allow_unused=*/true);
  }
  variable_list result(needs.size());
  for (size_t i = 0, next = 0; i < needs.size(); ++i) {
    if (needs[i]) result[i] = found[next++];
  }
  return result;
}

namespace {

struct QkvAttentionThirdOrder : OperandsNode<QkvAttentionThirdOrder> {
  // Of grad_out, grad_lse, the operands, and the cotangents of their gradients.
  static constexpr size_t kGradients = 2 + 2 * Operands::kDifferentiable;
  static constexpr size_t kOutputs = 0;

  std::string name() const override { return "QkvAttentionThirdOrder"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& others,
                                 const std::vector<bool>& needs) {
    report_third_order();
    return third_order(grads, x, others, needs);
  }
};

TensorTuple<8> attention_backward_backward(c10::DispatchKeySet keys, const Operands& x,
                                           const Tensor& grad_out, const OptionalTensor& grad_lse,
                                           const ForwardResults& forward,
                                           const Tangents& cotangents, NeedsOfSecond needs) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionThirdOrder> node;
  variable_list inputs = variables(x);
  inputs.insert(inputs.begin(), {grad_out, grad_lse.value_or(Tensor())});
  for (const OptionalTensor& cotangent : cotangents) inputs.push_back(cotangent.value_or(Tensor()));
  if (compute_requires_grad(at::TensorList(inputs))) {
    node = make_node<QkvAttentionThirdOrder>();
    node->set_next_edges(collect_next_edges(at::TensorList(inputs)));
    node->save_operands(x);
    node->save(grad_out, /*is_output=*/false);
    node->save(grad_lse, /*is_output=*/false);
    for (const OptionalTensor& cotangent : cotangents) node->save(cotangent, /*is_output=*/false);
  }
  std::array<Tensor, 8> grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = as_array(attention_backward_backward_op().redispatch(
        keys & c10::after_autograd_keyset, x, grad_out, grad_lse, forward, cotangents, needs));
  }
  if (node) set_history(variable_list(grads.begin(), grads.end()), node);
  if (any_tangent(inputs)) {
    report_third_order();
    const auto moved =
        as_array(reference::attention_backward_backward(x, grad_out, grad_lse, cotangents, needs));
    for (size_t i = 0; i < grads.size(); ++i) {
      if (needs[i]) set_tangent(grads[i], tangent(moved[i]));
    }
  }
  return std::tuple_cat(grads);
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv::autograd
