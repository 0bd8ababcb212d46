// The worked examples through the C++ door; Python's test has all of them.

#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace {

using nlohmann::json;
using torch::Tensor;

json examples() {
  std::ifstream file(QKV_WORKED_EXAMPLES);
  return json::parse(file);
}

Tensor matrix(const json& rows) {
  const auto numbers = rows.get<std::vector<std::vector<double>>>();
  std::vector<Tensor> tensors;
  for (const auto& row : numbers) tensors.push_back(torch::tensor(row, torch::kDouble));
  return torch::stack(tensors);
}

TEST(WorkedExamples, TheCatSatOnTheMat) {
  const json all = examples();
  for (const bool causal : {false, true}) {
    const json& e = all[causal ? "cat_sat_on_the_mat_causal" : "cat_sat_on_the_mat"];
    const Tensor x = matrix(e["embeddings"]);
    const auto options = qkv::AttentionOptions().scale(e["scale"].get<double>()).is_causal(causal);
    EXPECT_TRUE(
        torch::allclose(qkv::attention_weights(x, x, options), matrix(e["weights"]), 0, 1e-12));
    EXPECT_TRUE(torch::allclose(qkv::attention(x, x, x, options), matrix(e["output"]), 0, 1e-12));
  }
}

TEST(WorkedExamples, YourJourneyWithLearnedWeights) {
  const json all = examples();
  const json& e = all["your_journey_trainable"];
  for (const bool causal : {false, true}) {
    qkv::nn::SelfAttention module(qkv::nn::SelfAttentionOptions(3, 2).causal(causal));
    module->to(torch::kDouble);
    torch::NoGradGuard no_grad;
    module->w_q->weight.copy_(matrix(e["W_q"]).t());
    module->w_k->weight.copy_(matrix(e["W_k"]).t());
    module->w_v->weight.copy_(matrix(e["W_v"]).t());
    const json& expected = all[causal ? "your_journey_trainable_causal" : "your_journey_trainable"];
    const auto [context, weights] = module->forward_with_weights(matrix(e["inputs"]));
    EXPECT_TRUE(torch::allclose(weights, matrix(expected["weights"]), 0, 1e-7));
    EXPECT_TRUE(torch::allclose(context, matrix(expected["context"]), 0, 1e-7));
  }
}

}  // namespace
