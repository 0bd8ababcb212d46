// The derivative of _attention_jvp, J t, a function of the operands x and of their tangents t.
//
// In reverse mode, <c, J t> has the gradient Jᵀ c with respect to t, which is the backward for
// incoming gradients c; and with respect to x that of <Jᵀ c, t>, which is the double backward for
// cotangents t. In forward mode by reference formulas.

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd/operands_node.h"
#include "environment.h"
#include "reference.h"

namespace qkv::autograd {

namespace {

struct QkvAttentionJvpBackward : OperandsNode<QkvAttentionJvpBackward> {
  static constexpr size_t kOperands = Operands::kDifferentiable;
  static constexpr size_t kGradients = 2 * kOperands;  // of operands, of tangents
  static constexpr size_t kOutputs = 0;

  std::string name() const override { return "QkvAttentionJvpBackward"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& others,
                                 const std::vector<bool>& needs) {
    const ForwardResults forward{others[0], others[1], others[2], others[3]};
    const Tangents t = optional_tangents(others.data() + 4);
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(forward.out);
    const OptionalTensor grad_lse = optional(grads[1]);
    const auto of_operands = needs_of<kOperands>(needs),
               of_tangents = needs_of<kOperands>(needs, 6);
    const auto any_of = [](const Needs& n) {
      return std::find(n.begin(), n.end(), true) != n.end();
    };

    std::array<Tensor, kGradients> result;
    if (any_of(of_operands)) {
      NeedsOfSecond of_second = {};  // not of c
      std::copy(of_operands.begin(), of_operands.end(), of_second.begin() + 2);
      const auto moved =
          as_array(attention_backward_backward_op()(x, grad_out, grad_lse, forward, t, of_second));
      std::copy(moved.begin() + 2, moved.end(), result.begin());
    }
    if (any_of(of_tangents)) {
      const auto back =
          as_array(attention_backward_op()(x, grad_out, grad_lse, forward, of_tangents));
      std::copy(back.begin(), back.end(), result.begin() + kOperands);
    }
    return only_needed(result, needs);
  }
};

TensorTuple<2> attention_jvp(c10::DispatchKeySet keys, const Operands& x,
                             const ForwardResults& forward, const Tangents& t) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionJvpBackward> node;
  variable_list inputs = variables(x);
  for (const OptionalTensor& tangent : t) inputs.push_back(tangent.value_or(Tensor()));
  if (compute_requires_grad(at::TensorList(inputs))) {
    node = make_node<QkvAttentionJvpBackward>();
    node->set_next_edges(collect_next_edges(at::TensorList(inputs)));
    node->save_operands(x);
    for (const Tensor& result : forward.tensors()) node->save_constant(result);
    for (const OptionalTensor& tangent : t) node->save(tangent, /*is_output=*/false);
  }
  Tensor out_t, lse_t;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out_t, lse_t) =
        attention_jvp_op().redispatch(keys & c10::after_autograd_keyset, x, forward, t);
  }
  if (node) set_history({out_t, lse_t}, node);
  if (any_tangent(inputs)) {
    report_fallback("qkv::attention", "forward mode of forward mode has no fused kernel");
    const auto moved = reference::attention_jvp(x, t);
    set_tangent(out_t, tangent(std::get<0>(moved)));
    set_tangent(lse_t, tangent(std::get<1>(moved)));
  }
  return {out_t, lse_t};
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv::autograd
