#include <qkv/nn.h>

#include "nn/arguments.h"

namespace qkv::nn {

namespace {

constexpr const char* kSelfAttention = "qkv::nn::SelfAttention";

/// The input may have any number of batch dimensions, but the operator wants its heads in
/// dimension -3: this puts the one head there, and the masks beside it.
at::Tensor with_head(const at::Tensor& x) { return x.unsqueeze(-3); }

AttentionOptions attention_options(const SelfAttentionImpl& module, const at::Tensor& input,
                                   const at::Tensor& attn_mask,
                                   const at::Tensor& key_padding_mask) {
  std::optional<at::Tensor> mask = given(attn_mask);
  if (mask) check_mask_of_one_head(kSelfAttention, *mask, input);
  if (mask && mask->dim() > 2) mask = with_head(*mask);
  return AttentionOptions()
      .attn_mask(mask)
      .key_mask(key_mask_of(kSelfAttention, key_padding_mask, input))
      .is_causal(module.options.causal())
      .scale(module.options.scale());
}

struct Projected {
  at::Tensor query, key, value;
  AttentionOptions options;
};

Projected projected(SelfAttentionImpl& module, const at::Tensor& input, const at::Tensor& attn_mask,
                    const at::Tensor& key_padding_mask) {
  check_rows(kSelfAttention, "input", input, "d_in", module.options.d_in());
  const AttentionOptions options = attention_options(module, input, attn_mask, key_padding_mask);
  return {with_head(module.w_q(input)), with_head(module.w_k(input)), with_head(module.w_v(input)),
          options};
}

at::Tensor output(const SelfAttentionImpl& module, const Projected& p) {
  AttentionOptions options = p.options;
  options.dropout_p(module.is_training() ? module.options.dropout() : 0.0);
  return attention(p.query, p.key, p.value, options).squeeze(-3);
}

}  // namespace

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& options_) : options(options_) {
  reset();
}

void SelfAttentionImpl::reset() {
  check_positive(kSelfAttention, "d_in", options.d_in());
  check_positive(kSelfAttention, "d_out", options.d_out());
  check_positive(kSelfAttention, "d_v", options.d_v().value_or(options.d_out()));
  check_dropout(kSelfAttention, options.dropout());
  const auto linear = [&](const char* name, int64_t d_out) {
    return register_module(
        name,
        torch::nn::Linear(torch::nn::LinearOptions(options.d_in(), d_out).bias(options.bias())));
  };
  w_q = linear("w_q", options.d_out());
  w_k = linear("w_k", options.d_out());
  w_v = linear("w_v", options.d_v().value_or(options.d_out()));
}

void SelfAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << kSelfAttention << "(d_in=" << options.d_in() << ", d_out=" << options.d_out();
  if (options.d_v()) stream << ", d_v=" << *options.d_v();
  if (options.scale()) stream << ", scale=" << *options.scale();
  stream << std::boolalpha << ", bias=" << options.bias() << ", causal=" << options.causal()
         << ", dropout=" << options.dropout() << ")";
}

at::Tensor SelfAttentionImpl::forward(const at::Tensor& input, const at::Tensor& attn_mask,
                                      const at::Tensor& key_padding_mask) {
  const Projected p = projected(*this, input, attn_mask, key_padding_mask);
  return output(*this, p);
}

std::tuple<at::Tensor, at::Tensor> SelfAttentionImpl::forward_with_weights(
    const at::Tensor& input, const at::Tensor& attn_mask, const at::Tensor& key_padding_mask) {
  const Projected p = projected(*this, input, attn_mask, key_padding_mask);
  return {output(*this, p), attention_weights(p.query, p.key, p.options).squeeze(-3)};
}

}  // namespace qkv::nn
