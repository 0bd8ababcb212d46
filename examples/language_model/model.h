#pragma once

#include <qkv/qkv.h>
#include <torch/torch.h>

#include <string>
#include <vector>

/// A causal language model over bytes: embeddings, blocks of attention and MLP, and a head that
/// shares the embedding's weights (GPT-2's arrangement, layer norms first).
namespace language_model {

struct Config {
  int64_t vocabulary = 256;
  int64_t context = 128;  // positions it knows
  int64_t width = 128;
  int64_t heads = 4;
  int64_t layers = 4;
};

/// Keys and values of every layer.
using Cache = std::vector<c10::intrusive_ptr<qkv::nn::KVCache>>;

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Config& config);

  /// (B, T, width) to (B, T, width)
  torch::Tensor forward(torch::Tensor x, const c10::intrusive_ptr<qkv::nn::KVCache>& cache);

 private:
  torch::nn::LayerNorm norm_attention{nullptr}, norm_mlp{nullptr};
  qkv::nn::MultiheadAttention attention{nullptr};
  torch::nn::Linear widen{nullptr}, narrow{nullptr};
};
TORCH_MODULE(Block);

class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(const Config& config);

  /// \param tokens (B, T), int64; with a cache, the tokens after those already in it
  /// \returns logits (B, T, vocabulary) of the tokens that follow
  torch::Tensor forward(const torch::Tensor& tokens, const Cache* cache = nullptr);

  Cache make_cache() const;

  const Config config;

 private:
  torch::nn::Embedding token_embedding{nullptr}, position_embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(LanguageModel);

}  // namespace language_model
