#pragma once

#include <functional>
#include <string>

#include "model.h"
#include "text.h"

namespace language_model {

struct TrainingOptions {
  std::string output = ".";  // directory of the checkpoint
  double minutes = 2.0;
  int64_t steps = 0;    // instead of minutes, unless 0: the same on every machine
  bool resume = false;  // from the checkpoint in `output`
  int64_t batch = 4;    // small: in minutes on a CPU, steps count for more than their size
  double learning_rate = 3e-3;
};

/// How training stands.
struct Progress {
  int64_t step;
  double done;             // share of the time or steps, 0 to 1
  double loss;             // nats a byte, mean over the last steps
  double validation_loss;  // when it was last measured
  double tokens_per_second;
};

/// Mean loss (nats a byte) over the validation text.
double validation_loss(LanguageModel& model, const Text& text);

/// Trains for the time or steps given and writes the checkpoint, then and every ten seconds, so
/// that an interrupted training can be resumed: with its weights and its optimizer, while time,
/// steps and learning rate begin anew. Calls `report` about once a second.
Progress train(LanguageModel& model, const Text& text, const TrainingOptions& options,
               const std::function<void(const Progress&)>& report);

/// Continues `prompt` by `length` bytes, one at a time with a KV cache. When the context is full it
/// goes on from the last half of it.
std::string sample(LanguageModel& model, const std::string& prompt, int64_t length,
                   double temperature);

/// The weights alone, readable from Python too (qkv.nn.load_state_dict).
std::string weights_path(const std::string& directory);

}  // namespace language_model
