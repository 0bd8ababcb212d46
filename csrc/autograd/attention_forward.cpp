// The derivative of _attention_forward: in reverse mode _attention_backward, in forward mode
// _attention_jvp.

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd/operands_node.h"

namespace qkv::autograd {

namespace {

struct QkvAttentionBackward : OperandsNode<QkvAttentionBackward> {
  static constexpr size_t kGradients = Operands::kDifferentiable;
  static constexpr size_t kOutputs = 2;  // output, logsumexp

  std::string name() const override { return "QkvAttentionBackward"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& outputs,
                                 const std::vector<bool>& needs) {
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(outputs[0]);
    return only_needed(
        as_array(attention_backward_op()(x, grad_out, optional(grads[1]),
                                         {outputs[0], outputs[1], outputs[2], outputs[3]},
                                         needs_of<kGradients>(needs))),
        needs);
  }
};

TensorTuple<4> attention_forward(c10::DispatchKeySet keys, const Operands& x, bool needs_rest) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionBackward> node;
  const variable_list inputs = variables(x);
  if (compute_requires_grad(at::TensorList(inputs))) {
    node = make_node<QkvAttentionBackward>();
    node->set_next_edges(collect_next_edges(at::TensorList(inputs)));
    node->save_operands(x);
  }
  const Tangents t = tangents(x);
  needs_rest = needs_rest || node || any(t);
  Tensor out, lse, out_rest, lse_rest;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, lse, out_rest, lse_rest) =
        attention_forward_op().redispatch(keys & c10::after_autograd_keyset, x, needs_rest);
  }
  if (node) {
    set_history({out, lse}, node);
    node->save(out, /*is_output=*/true);
    node->save(lse, /*is_output=*/true);
    node->save(out_rest, /*is_output=*/false);
    node->save(lse_rest, /*is_output=*/false);
  }
  if (any(t)) {
    const auto [out_t, lse_t] = attention_jvp_op()(primal(x), {out, lse, out_rest, lse_rest}, t);
    set_tangent(out, out_t);
    set_tangent(lse, lse_t);
  }
  return {out, lse, out_rest, lse_rest};
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::autograd
