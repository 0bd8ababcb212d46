#include "train.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <numbers>

namespace language_model {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

torch::Tensor loss_of(LanguageModel& model,
                      const std::pair<torch::Tensor, torch::Tensor>& windows) {
  const auto logits = model->forward(windows.first);
  return torch::cross_entropy_loss(logits.flatten(0, 1), windows.second.flatten());
}

/// Warms up over the first twentieth of the training, then falls to a tenth along a cosine.
double learning_rate_at(double done, double highest) {
  constexpr double kWarmup = 0.05;
  if (done < kWarmup) return highest * std::max(done / kWarmup, 0.02);
  const double falling = std::min((done - kWarmup) / (1.0 - kWarmup), 1.0);
  return highest * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * falling)));
}

std::string optimizer_path(const std::string& directory) { return directory + "/optimizer.pt"; }

void save(LanguageModel& model, torch::optim::Optimizer& optimizer, const std::string& directory) {
  // Under another name first: an interruption leaves the old checkpoint whole.
  const auto replace = [](const std::string& path, const auto& write) {
    write(path + ".new");
    std::filesystem::rename(path + ".new", path);
  };
  replace(weights_path(directory),
          [&](const std::string& path) { qkv::nn::save_state_dict(*model, path); });
  replace(optimizer_path(directory),
          [&](const std::string& path) { torch::save(optimizer, path); });
}

}  // namespace

std::string weights_path(const std::string& directory) { return directory + "/weights.pt"; }

double validation_loss(LanguageModel& model, const Text& text) {
  torch::NoGradGuard no_grad;
  return loss_of(model, first_windows(text.validation, 64, model->config.context)).item<double>();
}

Progress train(LanguageModel& model, const Text& text, const TrainingOptions& options,
               const std::function<void(const Progress&)>& report) {
  torch::optim::AdamW optimizer(
      model->parameters(),
      torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.98}).weight_decay(0.05));
  if (options.resume) {
    qkv::nn::load_state_dict(*model, weights_path(options.output));
    torch::load(optimizer, optimizer_path(options.output));
  }
  const int64_t context = model->config.context;
  const double seconds = 60.0 * options.minutes;
  const auto start = Clock::now();
  Progress progress{0, 0.0, std::nan(""), validation_loss(model, text), 0.0};
  double reported = 0.0, saved = 0.0;
  while (progress.done < 1.0) {
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(learning_rate_at(progress.done, options.learning_rate));
    }
    optimizer.zero_grad();
    const auto loss = loss_of(model, sample_windows(text.training, options.batch, context));
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();

    ++progress.step;
    const double now = seconds_since(start);
    const double value = loss.item<double>();
    progress.loss = std::isnan(progress.loss) ? value : 0.95 * progress.loss + 0.05 * value;
    progress.done = options.steps > 0 ? static_cast<double>(progress.step) / options.steps
                                      : std::min(now / seconds, 1.0);
    progress.tokens_per_second = static_cast<double>(progress.step * options.batch * context) / now;
    if (now - saved > 10.0 || progress.done >= 1.0) {
      progress.validation_loss = validation_loss(model, text);
      save(model, optimizer, options.output);
      saved = now;
    }
    if (now - reported > 1.0 || progress.done >= 1.0) {
      report(progress);
      reported = now;
    }
  }
  return progress;
}

std::string sample(LanguageModel& model, const std::string& prompt, int64_t length,
                   double temperature) {
  torch::NoGradGuard no_grad;
  const auto context = static_cast<size_t>(model->config.context);
  const auto last = [&](const std::string& text, size_t length) {
    return text.substr(text.size() - std::min(text.size(), length));
  };
  Cache cache = model->make_cache();
  std::string text = prompt;
  std::string next = last(prompt, context);  // what the cache does not have yet
  for (int64_t i = 0; i < length; ++i) {
    if (cache.front()->length() + next.size() > context) {
      for (auto& layer : cache) layer->truncate(0);
      next = last(text, context / 2);
    }
    const auto tokens =
        torch::from_blob(next.data(), {1, static_cast<int64_t>(next.size())}, torch::kUInt8)
            .to(torch::kLong);
    const auto logits = model->forward(tokens, &cache).select(1, -1);
    const auto token = torch::multinomial(torch::softmax(logits / temperature, -1), 1);
    next = std::string(1, static_cast<char>(token.item<int64_t>()));
    text += next;
  }
  return text;
}

}  // namespace language_model
