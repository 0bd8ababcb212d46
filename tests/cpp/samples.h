#pragma once

#include <qkv/attention.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

// tests/samples.json, the table of samples that all tests use, as tensors and options.

namespace samples {

struct Sample {
  std::string name;
  bool large = false;  // too large for numerical differences
  bool empty = false;  // some size is 0
  torch::Tensor query, key, value;
  qkv::AttentionOptions options;
};

/// How GoogleTest names a sample in its messages.
inline void PrintTo(const Sample& sample, std::ostream* stream) { *stream << sample.name; }

/// All samples in float64.
std::vector<Sample> all();

/// Those that numerical differences can be taken of.
std::vector<Sample> small();

/// Every option with every other, drawn at random but always the same, and small enough for
/// differences of second order. Names are JSON, as an entry of the table.
std::vector<Sample> random(int count);

std::vector<Sample> named(const std::vector<std::string>& names);

}  // namespace samples
