#pragma once

#include <qkv/qkv.h>
#include <torch/torch.h>

/// The potential of examples/forces.py: energies by attention between atoms. Same names, same
/// numbers.
namespace potential {

struct Config {
  int64_t kinds = 2;
  int64_t width = 32;
  int64_t heads = 4;
  int64_t layers = 2;
};

/// Atoms look at their neighbours; each head learns how far.
class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(const Config& config);

  /// \param h (B, atoms, width)
  /// \param squared_distances (B, atoms, atoms)
  /// \returns (B, atoms, width)
  torch::Tensor forward(const torch::Tensor& h, const torch::Tensor& squared_distances);

 private:
  torch::nn::Linear w_qkv{nullptr};
  torch::nn::Sequential w_o{nullptr};
  torch::Tensor log_rates;
};
TORCH_MODULE(Layer);

class PotentialImpl : public torch::nn::Module {
 public:
  explicit PotentialImpl(const Config& config = {});

  /// \param positions (B, atoms, 3)
  /// \param kinds (atoms), int64
  /// \returns energies (B)
  torch::Tensor forward(const torch::Tensor& positions, const torch::Tensor& kinds);

  bool checkpoint = false;  // layers keep their inputs only, and are computed again for gradients

 private:
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::Linear energy{nullptr};
};
TORCH_MODULE(Potential);

/// -dE/dx, itself differentiable.
/// \param energy a function of positions (B, atoms, 3)
template <class Energy>
torch::Tensor forces(const Energy& energy, const torch::Tensor& positions) {
  const auto x = positions.detach().requires_grad_();
  return -torch::autograd::grad({energy(x).sum()}, {x}, /*grad_outputs=*/{},
                                /*retain_graph=*/true, /*create_graph=*/true)[0];
}

}  // namespace potential
