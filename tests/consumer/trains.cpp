#include <qkv/qkv.h>
#include <torch/torch.h>

#include <iostream>

// Learns to copy what the first token says to the last: not possible without attention.
int main() {
  torch::manual_seed(0);
  qkv::nn::MultiheadAttention attention(qkv::nn::MultiheadAttentionOptions(16, 2).causal(true));
  torch::nn::Linear head(16, 1);
  auto parameters = attention->parameters();
  for (const auto& p : head->parameters()) parameters.push_back(p);
  torch::optim::Adam optimizer(parameters, 1e-2);
  const auto position = torch::randn({4, 16});
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 100; ++step) {
    const auto x = torch::randn({32, 4, 16});
    const auto target = x.select(1, 0).select(1, 0);  // a number of the first token
    const auto found = head(attention(x + position)).select(1, 3).squeeze(-1);
    const auto loss = torch::mse_loss(found, target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << "loss " << first << " -> " << last << std::endl;
  return last < 0.6 * first ? 0 : 1;
}
