// Trains the language model, or samples from one.
//
//   language_model check  --text FILE..
//   language_model train  --text FILE.. --output DIR [--minutes N | --steps N] [--resume]
//   language_model sample --output DIR --prompt TEXT [--length N]
//
// With --json, training reports one JSON object a line on stdout, for a program to show.

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "model.h"
#include "text.h"
#include "train.h"

namespace {

using language_model::Progress;

nlohmann::json as_json(const Progress& p) {
  return {{"step", p.step},
          {"done", p.done},
          {"loss", p.loss},
          {"validation_loss", p.validation_loss},
          {"tokens_per_second", p.tokens_per_second}};
}

void print(const Progress& p) {
  std::cout << std::fixed << std::setprecision(3) << std::setw(5) << 100.0 * p.done << " %  step "
            << p.step << "  loss " << p.loss << "  validation " << p.validation_loss << "  "
            << std::setprecision(0) << p.tokens_per_second << " tokens/s" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A causal language model over bytes, built on qkv::nn::MultiheadAttention");
  app.require_subcommand(1);
  language_model::Config config;
  language_model::TrainingOptions options;
  std::vector<std::string> files;
  std::string prompt = "#include <";
  int64_t length = 200, seed = 0;
  double temperature = 0.8;
  bool json = false;

  CLI::App* checking = app.add_subcommand("check", "whether text files can be trained on");
  CLI::App* training = app.add_subcommand("train", "train on the bytes of text files");
  for (CLI::App* command : {checking, training}) {
    command->add_option("--text", files, "files to train on")->required();
  }
  CLI::Option* minutes = training->add_option("--minutes", options.minutes, "how long");
  minutes->check(CLI::PositiveNumber);
  training->add_option("--steps", options.steps, "how long, in steps")
      ->check(CLI::PositiveNumber)
      ->excludes(minutes);
  training->add_flag("--resume", options.resume, "begin with the checkpoint in --output");
  training->add_option("--batch", options.batch, "windows a step")->check(CLI::PositiveNumber);
  training->add_option("--learning-rate", options.learning_rate, "highest learning rate");
  training->add_flag("--json", json, "report progress as JSON lines");
  CLI::App* sampling = app.add_subcommand("sample", "continue a prompt");
  sampling->add_option("--prompt", prompt, "text to continue");
  sampling->add_option("--length", length, "bytes to add")->check(CLI::PositiveNumber);
  sampling->add_option("--temperature", temperature)->check(CLI::PositiveNumber);
  for (CLI::App* command : {training, sampling}) {
    command->add_option("--output", options.output, "directory of the checkpoint")->required();
    command->add_option("--width", config.width);
    command->add_option("--heads", config.heads);
    command->add_option("--layers", config.layers);
    command->add_option("--context", config.context);
    command->add_option("--seed", seed);
  }
  CLI11_PARSE(app, argc, argv);

  try {
    torch::manual_seed(seed);
    if (checking->parsed()) {
      const auto text = language_model::Text::read(files, config.context);
      std::cout << text.training.numel() << " bytes to train on" << std::endl;
    } else if (training->parsed()) {
      const auto text = language_model::Text::read(files, config.context);
      std::filesystem::create_directories(options.output);
      language_model::LanguageModel model(config);
      int64_t parameters = 0;
      for (const auto& p : model->parameters()) parameters += p.numel();
      const nlohmann::json about = {{"parameters", parameters},
                                    {"training_bytes", text.training.numel()},
                                    {"validation_bytes", text.validation.numel()},
                                    {"bigram_loss", language_model::bigram_loss(text)}};
      std::cout << (json ? about.dump() : about.dump(2)) << std::endl;
      language_model::train(model, text, options, [&](const Progress& progress) {
        if (json) {
          std::cout << as_json(progress).dump() << std::endl;
        } else {
          print(progress);
        }
      });
    } else {
      if (prompt.empty()) throw std::runtime_error("--prompt must have at least one byte");
      language_model::LanguageModel model(config);
      qkv::nn::load_state_dict(*model, language_model::weights_path(options.output));
      model->eval();
      std::cout << language_model::sample(model, prompt, length, temperature) << std::endl;
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
