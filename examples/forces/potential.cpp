#include "potential.h"

#include "checkpoint.h"

namespace potential {

using torch::Tensor;

LayerImpl::LayerImpl(const Config& config) {
  const int64_t width = config.width, heads = config.heads;
  w_qkv = register_module("w_qkv", torch::nn::Linear(width, 3 * width));
  w_o = register_module(
      "w_o", torch::nn::Sequential(torch::nn::Linear(width + heads, 2 * width), torch::nn::SiLU(),
                                   torch::nn::Linear(2 * width, width)));
  log_rates = register_parameter("log_rates", torch::linspace(-2.0, 1.5, heads));
}

Tensor LayerImpl::forward(const Tensor& h, const Tensor& squared_distances) {
  const auto qkv = w_qkv(h).chunk(3, -1);
  const auto heads = [&](const Tensor& x) {  // (B, heads, atoms, width / heads)
    return x.unflatten(-1, {log_rates.numel(), -1}).transpose(-3, -2);
  };
  const Tensor bias = -log_rates.exp().view({-1, 1, 1}) * squared_distances.unsqueeze(-3);
  const auto [out, lse] = qkv::attention_with_lse(heads(qkv[0]), heads(qkv[1]), heads(qkv[2]),
                                                  qkv::AttentionOptions().attn_mask(bias));
  return h + w_o->forward(torch::cat({out.transpose(-3, -2).flatten(-2), lse.mT()}, -1));
}

PotentialImpl::PotentialImpl(const Config& config) {
  embedding = register_module("embedding", torch::nn::Embedding(config.kinds, config.width));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(Layer(config));
  energy = register_module("energy", torch::nn::Linear(config.width, 1));
}

Tensor PotentialImpl::forward(const Tensor& positions, const Tensor& kinds) {
  const Tensor squared = (positions.unsqueeze(-2) - positions.unsqueeze(-3)).square().sum(-1);
  const Tensor embedded = embedding(kinds);
  Tensor h = embedded.expand({positions.size(0), -1, -1});
  for (const auto& module : *layers) {
    const auto layer = std::dynamic_pointer_cast<LayerImpl>(module);
    const auto block = [layer](const std::vector<Tensor>& x) { return layer->forward(x[0], x[1]); };
    h = checkpoint ? checkpoint::run(block, {h, squared}, layer->parameters())
                   : block({h, squared});
  }
  return energy(h).sum({-2, -1});
}

}  // namespace potential
