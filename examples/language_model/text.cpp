#include "text.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

namespace language_model {

namespace {

std::pair<torch::Tensor, torch::Tensor> windows(const torch::Tensor& bytes,
                                                const torch::Tensor& starts, int64_t context) {
  const auto index = starts.unsqueeze(1) + torch::arange(context + 1).unsqueeze(0);
  const auto tokens = bytes.index_select(0, index.flatten()).view(index.sizes()).to(torch::kLong);
  return {tokens.slice(1, 0, context), tokens.slice(1, 1)};
}

}  // namespace

Text Text::read(const std::vector<std::string>& files, int64_t context) {
  std::vector<uint8_t> all;
  for (const std::string& name : files) {
    std::ifstream file(name, std::ios::binary);
    std::vector<char> bytes;
    if (file) bytes.assign(std::istreambuf_iterator<char>(file), {});
    if (!file || file.bad()) throw std::runtime_error("cannot read the text file " + name);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  const size_t least = 20 * static_cast<size_t>(context + 1);
  if (all.size() < least) {
    throw std::runtime_error("the text is too short: " + std::to_string(all.size()) + " bytes in " +
                             std::to_string(files.size()) + " file(s), but at least " +
                             std::to_string(least) + " are needed");
  }
  // Blocks, so that both parts hold some of every file; in a short text each a tenth of it.
  const size_t block = std::min<size_t>(16384, all.size() / 10);
  std::vector<uint8_t> training, validation;
  for (size_t i = 0; i < all.size(); i += block) {
    auto& part = i / block % 10 == 9 ? validation : training;
    part.insert(part.end(), all.begin() + i, all.begin() + std::min(i + block, all.size()));
  }
  const auto tensor = [](std::vector<uint8_t>& x) {
    return torch::from_blob(x.data(), {static_cast<int64_t>(x.size())}, torch::kUInt8).clone();
  };
  return {tensor(training), tensor(validation)};
}

std::pair<torch::Tensor, torch::Tensor> sample_windows(const torch::Tensor& bytes, int64_t batch,
                                                       int64_t context) {
  return windows(bytes, torch::randint(bytes.size(0) - context, {batch}), context);
}

std::pair<torch::Tensor, torch::Tensor> first_windows(const torch::Tensor& bytes, int64_t batch,
                                                      int64_t context) {
  const int64_t there_are = (bytes.size(0) - 1) / context;
  return windows(bytes, torch::arange(std::min(batch, there_are)) * context, context);
}

double bigram_loss(const Text& text) {
  const auto pairs = [](const torch::Tensor& bytes) {
    const auto x = bytes.to(torch::kLong);
    return x.slice(0, 0, -1) * 256 + x.slice(0, 1);
  };
  const auto counts = torch::bincount(pairs(text.training), {}, 256 * 256).view({256, 256}) + 1;
  const auto log_probability = (counts / counts.sum(1, true).to(torch::kDouble)).log().flatten();
  return -log_probability.index_select(0, pairs(text.validation)).mean().item<double>();
}

}  // namespace language_model
