#include "model.h"

#include <cmath>

namespace language_model {

BlockImpl::BlockImpl(const Config& config) {
  const auto layer_norm = [&] {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width}));
  };
  norm_attention = register_module("norm_attention", layer_norm());
  attention = register_module(
      "attention",
      qkv::nn::MultiheadAttention(
          qkv::nn::MultiheadAttentionOptions(config.width, config.heads).causal(true)));
  norm_mlp = register_module("norm_mlp", layer_norm());
  widen = register_module("widen", torch::nn::Linear(config.width, 4 * config.width));
  narrow = register_module("narrow", torch::nn::Linear(4 * config.width, config.width));
}

torch::Tensor BlockImpl::forward(torch::Tensor x,
                                 const c10::intrusive_ptr<qkv::nn::KVCache>& cache) {
  x = x + attention->forward(norm_attention(x), {}, {}, {}, {}, cache);
  return x + narrow(torch::gelu(widen(norm_mlp(x))));
}

LanguageModelImpl::LanguageModelImpl(const Config& config_) : config(config_) {
  token_embedding =
      register_module("token_embedding", torch::nn::Embedding(config.vocabulary, config.width));
  position_embedding =
      register_module("position_embedding", torch::nn::Embedding(config.context, config.width));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) blocks->push_back(Block(config));
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));

  // Small embeddings, since they are the head as well; branches into the residual stream shrink
  // with their number (GPT-2, section 2.3).
  torch::NoGradGuard no_grad;
  torch::nn::init::normal_(token_embedding->weight, 0.0, 0.02);
  torch::nn::init::normal_(position_embedding->weight, 0.0, 0.02);
  const double branches = std::sqrt(2.0 * static_cast<double>(config.layers));
  for (auto& parameter : named_parameters()) {
    const std::string& name = parameter.key();
    if (name.ends_with("w_o.weight") || name.ends_with("narrow.weight")) {
      parameter.value().div_(branches);
    }
  }
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& tokens, const Cache* cache) {
  const int64_t first = cache != nullptr ? cache->front()->length() : 0;
  const int64_t length = tokens.size(1);
  TORCH_CHECK(first + length <= config.context, "language_model: ", first + length,
              " tokens, but the context is ", config.context);
  const auto positions = torch::arange(first, first + length, tokens.options());
  auto x = token_embedding(tokens) + position_embedding(positions);
  for (size_t i = 0; i < blocks->size(); ++i) {
    x = blocks->at<BlockImpl>(i).forward(x, cache != nullptr ? (*cache)[i] : nullptr);
  }
  return torch::linear(norm(x), token_embedding->weight);
}

Cache LanguageModelImpl::make_cache() const {
  Cache cache;
  for (int64_t i = 0; i < config.layers; ++i) {
    cache.push_back(c10::make_intrusive<qkv::nn::KVCache>(config.context));
  }
  return cache;
}

}  // namespace language_model
