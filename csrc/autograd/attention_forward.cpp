// The derivative of _attention_forward: in reverse mode _attention_backward, in forward mode
// _attention_jvp.

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd/operands_node.h"

namespace qkv::autograd {

namespace {

struct QkvAttentionBackward : OperandsNode<QkvAttentionBackward> {
  static constexpr size_t kSavedTensors = kOperandTensors + 2;  // output, logsumexp
  static constexpr size_t kGradients = 4;                       // query, key, value, attn_mask
  static constexpr bool kSavesOutputs = true;

  std::string name() const override { return "QkvAttentionBackward"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& outputs,
                                 const std::vector<bool>& needs) {
    const Tensor &out = outputs[0], &lse = outputs[1];
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const OptionalTensor grad_lse = grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
    const auto [grad_query, grad_key, grad_value, grad_mask] = attention_backward_op()(
        x, grad_out, grad_lse, out, lse, {needs[0], needs[1], needs[2], needs[3]});
    variable_list result{grad_query, grad_key, grad_value, grad_mask};
    for (size_t i = 0; i < result.size(); ++i) {
      if (!needs[i]) result[i] = Tensor();
    }
    return result;
  }
};

std::tuple<Tensor, Tensor> attention_forward(c10::DispatchKeySet keys, const Operands& x) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionBackward> node;
  const Tensor mask = x.attn_mask.value_or(Tensor());
  if (compute_requires_grad(x.query, x.key, x.value, mask)) {
    node = make_node<QkvAttentionBackward>();
    node->set_next_edges(collect_next_edges(x.query, x.key, x.value, mask));
    node->save_operands(x);
  }
  Tensor out, lse;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, lse) = attention_forward_op().redispatch(keys & c10::after_autograd_keyset, x);
  }
  if (node) {
    set_history({out, lse}, node);
    node->save(out, /*is_output=*/true);
    node->save(lse, /*is_output=*/true);
  }
  const OperandTangents t(x);
  if (t.any()) {
    const auto [out_t, lse_t] = attention_jvp_op()(primal(x), t.query, t.key, t.value, t.attn_mask);
    out._set_fw_grad(out_t, /*level=*/0, /*is_inplace_op=*/false);
    lse._set_fw_grad(lse_t, /*level=*/0, /*is_inplace_op=*/false);
  }
  return {out, lse};
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::autograd
