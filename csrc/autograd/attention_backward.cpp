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
  static constexpr size_t kSavedTensors = kOperandTensors + 2;  // grad_out, grad_lse
  static constexpr size_t kGradients = 6;  // grad_out, grad_lse, query, key, value, attn_mask
  static constexpr bool kSavesOutputs = false;

  std::string name() const override { return "QkvAttentionBackwardBackward"; }

  static variable_list gradients(const variable_list& grads, const Operands& x,
                                 const std::vector<Tensor>& others,
                                 const std::vector<bool>& needs) {
    const auto optional = [](const Tensor& t) {
      return t.defined() ? OptionalTensor(t) : std::nullopt;
    };
    const auto [grad_out, grad_lse, grad_query, grad_key, grad_value, grad_mask] =
        attention_backward_backward_op()(
            x, others[0], optional(others[1]), optional(grads[0]), optional(grads[1]),
            optional(grads[2]), optional(grads[3]),
            {needs[0], needs[1], needs[2], needs[3], needs[4], needs[5]});
    variable_list result{grad_out, grad_lse, grad_query, grad_key, grad_value, grad_mask};
    for (size_t i = 0; i < result.size(); ++i) {
      if (!needs[i]) result[i] = Tensor();
    }
    return result;
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void add(OptionalTensor& sum, const Tensor& x) { sum = sum ? sum->add(x) : x; }

/// Tangents of the four gradients.
std::array<OptionalTensor, 4> tangents(const Operands& x, const Tensor& grad_out,
                                       const OptionalTensor& grad_lse, const Tensor& out,
                                       const Tensor& lse, std::array<bool, 4> needs) {
  std::array<OptionalTensor, 4> result;
  const auto take = [&](const Gradients& grads) {
    const Tensor all[] = {std::get<0>(grads), std::get<1>(grads), std::get<2>(grads),
                          std::get<3>(grads)};
    for (size_t i = 0; i < 4; ++i) {
      if (needs[i]) add(result[i], all[i]);
    }
  };
  const OperandTangents t(x);
  if (t.any()) {
    const auto [grad_grad_out, grad_grad_lse, query_t, key_t, value_t, mask_t] =
        attention_backward_backward_op()(primal(x), primal(grad_out), primal(grad_lse), t.query,
                                         t.key, t.value, t.attn_mask,
                                         {false, false, needs[0], needs[1], needs[2], needs[3]});
    take({query_t, key_t, value_t, mask_t});
  }
  const OptionalTensor grad_out_t = tangent(grad_out), grad_lse_t = tangent(grad_lse);
  if (grad_out_t || grad_lse_t) {
    const Tensor moved_out = grad_out_t ? *grad_out_t : at::zeros_like(primal(grad_out));
    take(
        attention_backward_op()(primal(x), moved_out, grad_lse_t, primal(out), primal(lse), needs));
  }
  return result;
}

Gradients attention_backward(c10::DispatchKeySet keys, const Operands& x, const Tensor& grad_out,
                             const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
                             std::array<bool, 4> needs) {
  using namespace torch::autograd;
  NodePointer<QkvAttentionBackwardBackward> node;
  const Tensor mask = x.attn_mask.value_or(Tensor()), lse_grad = grad_lse.value_or(Tensor());
  if (compute_requires_grad(grad_out, lse_grad, x.query, x.key, x.value, mask)) {
    node = make_node<QkvAttentionBackwardBackward>();
    node->set_next_edges(collect_next_edges(grad_out, lse_grad, x.query, x.key, x.value, mask));
    node->save_operands(x);
    node->save(grad_out, /*is_output=*/false);
    node->save(grad_lse, /*is_output=*/false);
  }
  std::array<Tensor, 4> grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(grads[0], grads[1], grads[2], grads[3]) = attention_backward_op().redispatch(
        keys & c10::after_autograd_keyset, x, grad_out, grad_lse, out, lse, needs);
  }
  if (node) set_history({grads[0], grads[1], grads[2], grads[3]}, node);
  const auto moved = tangents(x, grad_out, grad_lse, out, lse, needs);
  for (size_t i = 0; i < 4; ++i) {
    if (moved[i]) grads[i]._set_fw_grad(*moved[i], /*level=*/0, /*is_inplace_op=*/false);
  }
  return {grads[0], grads[1], grads[2], grads[3]};
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) { m.impl("_attention_backward", flat<&attention_backward>); }

}  // namespace

}  // namespace qkv::autograd
