// Trains a potential on forces: the gradient of a loss on -dE/dx is a second derivative of the
// energy, through attention. examples/forces.py is the same in Python, with more words.
//
//   forces [--steps N] [--batch N] [--checkpoint] [--output DIR] [--json]
//
// With --json, prints one JSON object of what it found. --output is where the weights go, and
// examples/forces.py's Potential can load them.

#include <c10/util/ThreadLocalDebugInfo.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint.h"
#include "potential.h"

namespace {

using potential::forces;
using torch::Tensor;

/// What is learned: pairs of atoms in a well, at a distance that depends on their kinds.
Tensor morse(const Tensor& positions, const Tensor& kinds) {
  const auto pairs = torch::triu_indices(positions.size(1), positions.size(1), 1);
  const Tensor i = pairs[0], j = pairs[1];
  const Tensor distances =
      (positions.index_select(1, i) - positions.index_select(1, j)).norm(2, -1);
  const Tensor rest = 1.0 + 0.25 * (kinds.index_select(0, i) + kinds.index_select(0, j));
  return (1.0 - (rest - distances).exp()).square().sum(-1);
}

/// Random clusters of 8 atoms: near corners of a cube.
Tensor clusters(int64_t count) {
  const Tensor ends = torch::tensor({0.0f, 1.2f});
  return torch::cartesian_prod({ends, ends, ends}) + 0.15 * torch::randn({count, 8, 3});
}

/// The share of the forces on some clusters that the model does not explain.
Tensor loss_of(potential::Potential& model, const Tensor& positions, const Tensor& kinds) {
  const Tensor target =
      forces([&](const Tensor& x) { return morse(x, kinds); }, positions).detach();
  const Tensor found = forces([&](const Tensor& x) { return model(x, kinds); }, positions);
  return (found - target).square().mean() / target.square().mean();
}

/// Largest difference of the forces on one cluster from finite differences of the energy, relative
/// to the largest force. For float64.
double force_error(potential::Potential& model, const Tensor& x, const Tensor& kinds) {
  constexpr double kStep = 1e-5;
  const Tensor moves = kStep * torch::eye(x.numel(), x.options()).view({-1, x.size(1), 3});
  const Tensor found = forces([&](const Tensor& x) { return model(x, kinds); }, x).flatten();
  const torch::NoGradGuard no_grad;
  const Tensor expected = (model(x - moves, kinds) - model(x + moves, kinds)) / (2 * kStep);
  return ((found - expected).abs().max() / found.abs().max()).item<double>();
}

/// Counts the bytes of the tensors that live, of those allocated while it is in force.
class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    count += bytes;  // negative when freed
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t count = 0;
};

/// Of what the graph of the energies keeps until gradients are asked for.
int64_t bytes_kept(potential::Potential& model, const Tensor& positions, const Tensor& kinds) {
  const Tensor x = positions.detach().requires_grad_();
  const auto live = std::make_shared<LiveBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, live);
  const Tensor energies = model(x, kinds);
  return live->count;
}

/// Of loss_of, all of them in one row.
Tensor gradients(potential::Potential& model, const Tensor& positions, const Tensor& kinds) {
  std::vector<Tensor> rows;
  // (No force depends on the bias of the energy.)
  for (const Tensor& g :
       torch::autograd::grad({loss_of(model, positions, kinds)}, model->parameters(), {},
                             /*retain_graph=*/false, /*create_graph=*/false,
                             /*allow_unused=*/true)) {
    if (g.defined()) rows.push_back(g.flatten());
  }
  return torch::cat(rows);
}

/// What checkpointing changes: memory, and gradients by how much, relative to the largest.
nlohmann::json compare_checkpoint(potential::Potential& model, const Tensor& kinds) {
  const Tensor positions = clusters(16);
  model->checkpoint = false;
  const Tensor expected = gradients(model, positions, kinds);
  const int64_t bytes = bytes_kept(model, positions, kinds);
  model->checkpoint = true;
  const Tensor found = gradients(model, positions, kinds);
  const auto difference = (found - expected).abs().max() / expected.abs().max();
  return {{"difference", difference.item<double>()},
          {"bytes_kept", bytes_kept(model, positions, kinds)},
          {"bytes_kept_without", bytes}};
}

/// The same of an attention that drops weights; 0 only if it drops the same ones again, and goes on
/// with the same random numbers afterwards.
double dropout_difference() {
  const Tensor x = torch::randn({2, 5, 4}).requires_grad_();
  const checkpoint::Block block = [](const std::vector<Tensor>& x) {
    return qkv::attention(x[0], x[0], x[0], qkv::AttentionOptions().dropout_p(0.4)).sin();
  };
  const auto gradient_and_next = [&](const auto& call) {
    torch::manual_seed(1);
    const Tensor gradient = torch::autograd::grad({call().sum()}, {x})[0];
    return torch::cat({gradient.flatten(), torch::rand(1)});
  };
  const Tensor expected = gradient_and_next([&] { return block({x}); });
  const Tensor found = gradient_and_next([&] { return checkpoint::run(block, {x}, {}); });
  return (found - expected).abs().max().item<double>();
}

nlohmann::json as_json(const Tensor& x) {
  const Tensor flat = x.detach().to(torch::kDouble).contiguous();
  const double* first = flat.const_data_ptr<double>();
  return std::vector<double>(first, first + flat.numel());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A potential made of attention, trained on forces");
  int64_t steps = 150, batch = 16;
  bool checkpoint = false, json = false;
  std::string output;
  app.add_option("--steps", steps, "of training")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "clusters a step")->check(CLI::PositiveNumber);
  app.add_flag("--checkpoint", checkpoint, "compute layers again instead of keeping them");
  app.add_option("--output", output, "directory for the weights");
  app.add_flag("--json", json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);

  try {
    torch::manual_seed(0);
    potential::Potential model;
    model->checkpoint = checkpoint;
    const Tensor kinds = torch::arange(8) % 2;
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));
    std::vector<double> losses;
    for (int64_t step = 0; step < steps; ++step) {
      const Tensor loss = loss_of(model, clusters(batch), kinds);
      optimizer.zero_grad();
      loss.backward();  // through the backward of attention
      optimizer.step();
      losses.push_back(loss.item<double>());
      if (!json && (step % 25 == 0 || step == steps - 1)) {
        std::cout << "step " << step << ": share of the forces that is not explained "
                  << losses.back() << std::endl;
      }
    }
    if (!output.empty()) {
      std::filesystem::create_directories(output);
      qkv::nn::save_state_dict(*model, output + "/forces.pt");
    }
    const auto of_checkpoint = compare_checkpoint(model, kinds);
    model->checkpoint = checkpoint;
    model->to(torch::kDouble);
    const Tensor x = clusters(1).to(torch::kDouble);
    const double error = force_error(model, x, kinds);
    if (json) {
      const Tensor found = forces([&](const Tensor& x) { return model(x, kinds); }, x);
      const nlohmann::json all = {{"losses", losses},
                                  {"force_error", error},
                                  {"checkpoint", of_checkpoint},
                                  {"dropout_difference", dropout_difference()},
                                  {"positions", as_json(x)},
                                  {"forces", as_json(found)}};
      std::cout << all.dump() << std::endl;
    } else {
      std::cout << "forces beside finite differences of the energy, in float64: " << error
                << "\nwith checkpointing the graph keeps " << of_checkpoint["bytes_kept"]
                << " bytes instead of " << of_checkpoint["bytes_kept_without"]
                << ", and gradients of the loss differ by " << of_checkpoint["difference"]
                << std::endl;
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
