#pragma once

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

namespace language_model {

/// Bytes, split into what is trained on and what the loss is reported on.
struct Text {
  torch::Tensor training;    // (n), uint8
  torch::Tensor validation;  // (m), uint8

  /// Reads and joins files. Every tenth block of 16 KiB goes into validation.
  /// \throws std::runtime_error for a file that cannot be read, and if all of them together hold
  ///     fewer bytes than a few contexts.
  static Text read(const std::vector<std::string>& files, int64_t context);
};

/// Random windows of `context` bytes and the bytes that follow each of them, (batch, context) both,
/// int64.
std::pair<torch::Tensor, torch::Tensor> sample_windows(const torch::Tensor& bytes, int64_t batch,
                                                       int64_t context);

/// The first windows of `context` bytes, side by side.
std::pair<torch::Tensor, torch::Tensor> first_windows(const torch::Tensor& bytes, int64_t batch,
                                                      int64_t context);

/// Loss (nats a byte) on `validation` of the model that knows one byte back: counts in `training`,
/// plus one.
double bigram_loss(const Text& text);

}  // namespace language_model
