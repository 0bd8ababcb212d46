// Loads the language model three ways, in a process without Python, and compares their logits:
// as the C++ module, as TorchScript, as an AOTInductor package. Prints one JSON object.
//
//   run_exported DIR      where export.py wrote model.ts and model.pt2

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "model.h"
#include "train.h"

namespace {

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

/// Gradient of a loss with respect to the embedding, to show that a loaded TorchScript trains.
torch::Tensor gradient(const torch::Tensor& logits, const torch::Tensor& weight) {
  return torch::autograd::grad({torch::log_softmax(logits, -1).select(-1, 0).sum()}, {weight})[0];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run_exported DIR\n";
    return 2;
  }
  const std::string directory = argv[1];
  try {
    language_model::LanguageModel model{language_model::Config()};
    qkv::nn::load_state_dict(*model, language_model::weights_path(directory));
    model->eval();
    auto script = torch::jit::load(directory + "/model.ts");
    torch::inductor::AOTIModelPackageLoader package(directory + "/model.pt2");

    torch::manual_seed(0);
    nlohmann::json result = {{"torchscript", 0.0}, {"aotinductor", 0.0}};
    for (const auto& [batch, length] : {std::pair{1, 1}, {2, 17}, {3, 128}}) {  // none as exported
      const auto tokens = torch::randint(256, {batch, length}, torch::kLong);
      torch::NoGradGuard no_grad;
      const auto logits = model->forward(tokens);
      const auto note = [&](const char* name, const torch::Tensor& other) {
        const double difference = largest_difference(logits, other);
        // What is not less may be NaN.
        if (!(difference <= result[name].get<double>())) result[name] = difference;
      };
      note("torchscript", script.forward({tokens}).toTensor());
      note("aotinductor", package.run({tokens}).at(0));
    }
    const auto tokens = torch::randint(256, {2, 64}, torch::kLong);
    const auto of_module =
        gradient(model->forward(tokens), model->named_parameters()["token_embedding.weight"]);
    const auto of_script =
        gradient(script.forward({tokens}).toTensor(),
                 script.attr("token_embedding").toModule().attr("weight").toTensor());
    result["torchscript_gradient"] =
        largest_difference(of_module, of_script) / of_module.abs().max().item<double>();
    std::cout << result.dump() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
