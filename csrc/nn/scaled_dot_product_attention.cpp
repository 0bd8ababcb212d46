#include <qkv/nn.h>

#include "nn/arguments.h"

namespace qkv::nn {

namespace {

constexpr const char* kScaledDotProductAttention = "qkv::nn::ScaledDotProductAttention";

AttentionOptions attention_options(const ScaledDotProductAttentionImpl& module,
                                   const at::Tensor& keys, const at::Tensor& attn_mask,
                                   const at::Tensor& key_padding_mask) {
  return AttentionOptions()
      .attn_mask(given(attn_mask))
      .key_mask(key_mask_of(kScaledDotProductAttention, key_padding_mask, keys))
      .is_causal(module.options.causal())
      .scale(module.options.scale());
}

}  // namespace

ScaledDotProductAttentionImpl::ScaledDotProductAttentionImpl(
    const ScaledDotProductAttentionOptions& options_)
    : options(options_) {
  reset();
}

void ScaledDotProductAttentionImpl::reset() {
  check_dropout(kScaledDotProductAttention, options.dropout());
}

void ScaledDotProductAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << kScaledDotProductAttention << "(";
  if (options.scale()) stream << "scale=" << *options.scale() << ", ";
  stream << "dropout=" << options.dropout() << ", causal=" << std::boolalpha << options.causal()
         << ")";
}

at::Tensor ScaledDotProductAttentionImpl::forward(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value,
                                                  const at::Tensor& attn_mask,
                                                  const at::Tensor& key_padding_mask) {
  const at::Tensor& keys = key.defined() ? key : query;
  return attention(query, keys, value.defined() ? value : keys,
                   attention_options(*this, keys, attn_mask, key_padding_mask)
                       .dropout_p(is_training() ? options.dropout() : 0.0));
}

std::tuple<at::Tensor, at::Tensor> ScaledDotProductAttentionImpl::forward_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& attn_mask, const at::Tensor& key_padding_mask) {
  const at::Tensor& keys = key.defined() ? key : query;
  return {
      forward(query, key, value, attn_mask, key_padding_mask),
      attention_weights(query, keys, attention_options(*this, keys, attn_mask, key_padding_mask))};
}

}  // namespace qkv::nn
