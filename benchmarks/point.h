#pragma once

#include <qkv/qkv.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

/// What is timed of a call. A jvp is the call itself with tangents: of query, key and value, or of
/// the query alone.
enum class Pass { kForward, kBackward, kDoubleBackward, kJvp, kJvpOfQuery };

/// One point of the grid: the tensors of one call, and what is timed on them.
class Point {
 public:
  /// From an element of the array that benchmarks/grid.py writes.
  explicit Point(const nlohmann::json& json);

  /// Name -> what one turn runs: "qkv", PyTorch's "sdpa" and "math" where they can do the same,
  /// "plain" (qkv without the point's options), "first_order" (of a double backward our backward,
  /// of a jvp our forward), and the limits.
  /// The first turn of a backward makes its graph.
  std::map<std::string, std::function<void()>> systems() const;

 private:
  using Attention = std::function<torch::Tensor(
      const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value)>;

  Attention ours(const qkv::AttentionOptions& options) const;
  Attention pytorch(bool math) const;
  std::function<void()> timed(Pass pass, const Attention& attention) const;
  bool has_math() const;

  Pass pass_;
  bool causal_;
  double dropout_;
  bool pytorch_can_;
  bool has_plain_;
  torch::Tensor query_, key_, value_, mask_, grad_out_;
  torch::Tensor pytorch_mask_;  // what says the same to PyTorch: ALiBi and windows too
  std::vector<torch::Tensor> inputs_;
  std::vector<torch::Tensor> directions_;  // of query, key and value (and the mask): any numbers
  qkv::AttentionOptions options_, plain_;
};
