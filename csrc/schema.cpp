// Every operator of the library. What is public comes first; names that begin with an underscore
// are internal: fixed arity, pure functions, no undefined tensors.

#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include "internal_op.h"

namespace qkv {

namespace {

/// TorchScript merges equal calls and computes those of constants once, unless it assumes effects;
/// of operators that are not ATen's it ignores the tag for nondeterminism.
c10::FunctionSchema drawing(const char* schema) {
  return torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE);
}

// clang-format off

TORCH_LIBRARY(qkv, m) {
  m.def(drawing("attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "
        "SymInt[2]? window=None, SymInt? query_offset=None, float softcap=0.0, "
        "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? key_mask=None) -> Tensor"),
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});

  m.def(drawing("attention_with_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "
        "SymInt[2]? window=None, SymInt? query_offset=None, float softcap=0.0, "
        "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? key_mask=None) "
        "-> (Tensor output, Tensor logsumexp)"),
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});

  m.def("attention_weights(Tensor query, Tensor key, Tensor? attn_mask=None, "
        "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "
        "SymInt[2]? window=None, SymInt? query_offset=None, float softcap=0.0, "
        "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? key_mask=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});

  m.def("explain(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "
        "SymInt[2]? window=None, SymInt? query_offset=None, float softcap=0.0, "
        "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? key_mask=None) -> str",
        {at::Tag::pt2_compliant_tag});

  // The kernels' outputs follow the strides of their inputs, so a compiler must not change those.
  const std::vector<at::Tag> internal = {at::Tag::pt2_compliant_tag,
                                         at::Tag::needs_exact_strides};

  const std::string operands =
      "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, "
      "Tensor? sinks, Tensor? key_mask, Tensor? dropout_seed, float? scale, float softcap, "
      "float dropout_p, SymInt[] band";

  const auto define = [&](const std::string& name, const std::string& rest) {
    m.def((name + '(' + operands + rest).c_str(), internal);
  };

  define("_attention_forward", ", bool needs_rest=True) -> (Tensor output, Tensor logsumexp, "
        "Tensor output_rest, Tensor logsumexp_rest)");

  define("_attention_weights", ") -> (Tensor weights, Tensor logsumexp, Tensor logsumexp_rest)");

  // What _attention_forward gave: a function of the operands, not a variable.
  const std::string results =
      ", Tensor output, Tensor logsumexp, Tensor output_rest, Tensor logsumexp_rest";

  define("_attention_backward", ", Tensor grad_output, Tensor? grad_logsumexp" + results +
        ", bool[6] needs) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
        "Tensor grad_attn_mask, Tensor grad_alibi_slopes, Tensor grad_sinks)");

  define("_attention_weights_backward", ", Tensor grad_weights, Tensor logsumexp, "
        "Tensor logsumexp_rest, bool[6] needs) -> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value, Tensor grad_attn_mask, Tensor grad_alibi_slopes, Tensor grad_sinks)");

  define("_attention_jvp", results + ", Tensor? query_t, Tensor? key_t, Tensor? value_t, "
        "Tensor? attn_mask_t, Tensor? alibi_slopes_t, Tensor? sinks_t) "
        "-> (Tensor output_t, Tensor logsumexp_t)");

  define("_attention_backward_backward", ", Tensor grad_output, Tensor? grad_logsumexp" + results +
        ", Tensor? grad_grad_query, Tensor? grad_grad_key, "
        "Tensor? grad_grad_value, Tensor? grad_grad_attn_mask, Tensor? grad_grad_alibi_slopes, "
        "Tensor? grad_grad_sinks, bool[8] needs) -> (Tensor grad_grad_output, "
        "Tensor grad_grad_logsumexp, Tensor grad_query, Tensor grad_key, Tensor grad_value, "
        "Tensor grad_attn_mask, Tensor grad_alibi_slopes, Tensor grad_sinks)");
}

// clang-format on

}  // namespace

const InternalOp<Forward>& attention_forward_op() {
  static const InternalOp<Forward> op(kForwardOp);
  return op;
}

const InternalOp<Weights>& attention_weights_op() {
  static const InternalOp<Weights> op(kWeightsOp);
  return op;
}

const InternalOp<Backward>& attention_backward_op() {
  static const InternalOp<Backward> op(kBackwardOp);
  return op;
}

const InternalOp<WeightsBackward>& attention_weights_backward_op() {
  static const InternalOp<WeightsBackward> op(kWeightsBackwardOp);
  return op;
}

const InternalOp<Jvp>& attention_jvp_op() {
  static const InternalOp<Jvp> op(kJvpOp);
  return op;
}

const InternalOp<BackwardBackward>& attention_backward_backward_op() {
  static const InternalOp<BackwardBackward> op(kBackwardBackwardOp);
  return op;
}

}  // namespace qkv
