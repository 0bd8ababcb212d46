#pragma once

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

// LibTorch has no gradcheck in C++; this is one, after torch.autograd.gradcheck.

namespace gradcheck {

using torch::Tensor;
using Function = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

struct Options {
  double step = 1e-6;
  double rtol = 1e-4;
  double atol = 1e-6;
};

/// The empty string if the gradients of f are right, else what differs.
///
/// Compares the full Jacobian that autograd gives with central differences, (f(x + h) - f(x - h)) /
/// 2h for every element of every input that requires grad. Inputs are float64.
inline std::string first_order(const Function& f, const std::vector<Tensor>& inputs,
                               const Options& options = {}) {
  std::vector<Tensor> wanted;
  for (const Tensor& x : inputs) {
    if (!x.requires_grad()) continue;
    TORCH_CHECK(x.scalar_type() == torch::kDouble && x.is_leaf() && x.is_contiguous(),
                "gradcheck: inputs must be contiguous float64 leaves");
    wanted.push_back(x);
  }
  const size_t count = f(inputs).size();
  for (size_t o = 0; o < count; ++o) {
    const Tensor output = f(inputs)[o];  // anew: the differences below touch the inputs in place
    const int64_t numel = output.numel();
    // Rows: elements of the output. Columns: elements of all inputs.
    std::vector<Tensor> rows;
    for (int64_t r = 0; r < numel; ++r) {
      Tensor seed = torch::zeros_like(output, torch::MemoryFormat::Contiguous);
      seed.view(-1)[r] = 1.0;
      std::vector<Tensor> grads;
      if (output.requires_grad()) {
        grads = torch::autograd::grad({output}, wanted, {seed}, /*retain_graph=*/true,
                                      /*create_graph=*/false, /*allow_unused=*/true);
      } else {
        grads.resize(wanted.size());
      }
      std::vector<Tensor> flat;
      for (size_t i = 0; i < wanted.size(); ++i) {
        flat.push_back((grads[i].defined() ? grads[i] : torch::zeros_like(wanted[i])).reshape(-1));
      }
      rows.push_back(torch::cat(flat));
    }
    if (rows.empty()) continue;
    const Tensor analytical = torch::stack(rows);

    std::vector<Tensor> columns;
    for (const Tensor& x : wanted) {
      for (int64_t e = 0; e < x.numel(); ++e) {
        const auto value_at = [&](double shift) {
          torch::NoGradGuard no_grad;
          Tensor element = x.view(-1)[e];
          const double before = element.item<double>();
          element.fill_(before + shift);
          const Tensor value = f(inputs)[o].clone();
          element.fill_(before);
          return value;
        };
        columns.push_back(
            ((value_at(options.step) - value_at(-options.step)) / (2 * options.step)).reshape(-1));
      }
    }
    const Tensor numerical = torch::stack(columns, 1);
    if (!torch::allclose(analytical, numerical, options.rtol, options.atol)) {
      const double worst = (analytical - numerical).abs().max().item<double>();
      return "output " + std::to_string(o) + ": the Jacobians differ by up to " +
             std::to_string(worst);
    }
  }
  return "";
}

/// As first_order, for forward mode: the derivative along one random direction of all inputs.
inline std::string forward_mode(const Function& f, const std::vector<Tensor>& inputs,
                                const Options& options = {}) {
  std::vector<Tensor> tangents, duals;
  for (const Tensor& x : inputs) tangents.push_back(torch::randn_like(x).detach());
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  for (size_t i = 0; i < inputs.size(); ++i) {
    duals.push_back(at::_make_dual(inputs[i].detach(), tangents[i], static_cast<int64_t>(level)));
  }
  std::vector<Tensor> analytical;
  for (const Tensor& output : f(duals)) {
    const Tensor t = std::get<1>(at::_unpack_dual(output, static_cast<int64_t>(level)));
    analytical.push_back((t.defined() ? t : torch::zeros_like(output)).detach().clone());
  }
  duals.clear();
  torch::autograd::ForwardADLevel::release_idx(level);

  const auto moved_by = [&](double step) {
    std::vector<Tensor> moved;
    for (size_t i = 0; i < inputs.size(); ++i) {
      moved.push_back((inputs[i].detach() + step * tangents[i]).requires_grad_());
    }
    return f(moved);
  };
  const auto ahead = moved_by(options.step), behind = moved_by(-options.step);
  for (size_t o = 0; o < ahead.size(); ++o) {
    const Tensor numerical = ((ahead[o] - behind[o]) / (2 * options.step)).detach();
    if (!torch::allclose(analytical[o], numerical, options.rtol, options.atol)) {
      const double worst = (analytical[o] - numerical).abs().max().item<double>();
      return "output " + std::to_string(o) + ": the derivatives differ by up to " +
             std::to_string(worst);
    }
  }
  return "";
}

/// The gradients of f, as a function of its inputs and then of the gradients of its outputs.
inline Function gradients_of(const Function& f, size_t inputs) {
  return [f, inputs](const std::vector<Tensor>& all) {
    torch::AutoGradMode grad_mode(true);
    std::vector<Tensor> x, wanted;
    for (size_t i = 0; i < inputs; ++i) {
      x.push_back(all[i].requires_grad() ? all[i] : all[i].view_as(all[i]).requires_grad_());
    }
    const std::vector<Tensor> grad_outputs(all.begin() + static_cast<int64_t>(inputs), all.end());
    return torch::autograd::grad(f(x), x, grad_outputs, /*retain_graph=*/true,
                                 /*create_graph=*/true);
  };
}

/// The inputs of gradients_of(f): those of f, and random gradients of its outputs.
inline std::vector<Tensor> extended(const Function& f, std::vector<Tensor> inputs) {
  for (const Tensor& output : f(inputs)) {
    inputs.push_back(
        torch::randn_like(output, torch::MemoryFormat::Contiguous).detach().requires_grad_());
  }
  return inputs;
}

/// As first_order, of the gradients of f.
inline std::string second_order(const Function& f, const std::vector<Tensor>& inputs,
                                const Options& options = {}) {
  return first_order(gradients_of(f, inputs.size()), extended(f, inputs), options);
}

/// As forward_mode, of the gradients of f.
inline std::string forward_over_reverse(const Function& f, const std::vector<Tensor>& inputs,
                                        const Options& options = {}) {
  return forward_mode(gradients_of(f, inputs.size()), extended(f, inputs), options);
}

}  // namespace gradcheck
