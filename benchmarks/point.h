#pragma once

#include <qkv/qkv.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

/// One point of the grid: the tensors of one call, and what is timed on them.
class Point {
 public:
  /// From an element of the array that benchmarks/grid.py writes.
  explicit Point(const nlohmann::json& json);

  /// Name -> what one turn runs: "qkv", PyTorch's "sdpa" and "math" where they can do the same,
  /// "plain" (qkv without the point's options), and the limits.
  std::map<std::string, std::function<void()>> systems() const;

 private:
  using Attention = std::function<torch::Tensor()>;

  std::function<void()> timed(const Attention& attention) const;
  torch::Tensor pytorch(bool math) const;

  bool backward_;
  bool causal_;
  double dropout_;
  bool pytorch_can_;
  bool has_plain_;
  torch::Tensor query_, key_, value_, mask_, grad_out_;
  torch::Tensor pytorch_mask_;  // what says the same to PyTorch: ALiBi and windows too
  std::vector<torch::Tensor> inputs_;
  qkv::AttentionOptions options_, plain_;
};
