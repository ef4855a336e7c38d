// weft generate RUN_DIR --prompt TEXT
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>

#include "weft/cli/torch/commands.h"
#include "weft/config/tokenizer.h"
#include "weft/models/generate.h"
#include "weft/train/weights.h"

namespace weft::cli {
namespace {

/// A slip of the keyboard should not ask for all memory.
constexpr int64_t kMostTokens = 1'000'000;

struct Options {
  std::string run_dir, prompt = "\n";
  int64_t tokens = 200;
  bool averaged = false;
  models::GenerateOptions generate{.temperature = 0.8, .top_k = 0, .seed = 1};
};

void run_generate(const Options& options) {
  train::TrainedModel trained = train::load_run(options.run_dir, options.averaged);
  const auto tokenizer = config::make_tokenizer(trained.tokenizer);
  std::vector<uint32_t> prompt;
  tokenizer->encode(options.prompt, prompt);
  const auto ids = models::generate(trained.model, {prompt.begin(), prompt.end()}, options.tokens, options.generate);
  const std::string text = options.prompt + tokenizer->decode(std::vector<uint32_t>(ids.begin(), ids.end())) + "\n";
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

void add_generate(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text with the model of a run folder");
  command->add_option("run_dir", options->run_dir, "folder that weft train wrote")->required();
  command->add_option("--prompt", options->prompt, "text to continue (default: an empty line)");
  command->add_flag("--ema", options->averaged, "with the averaged weights of a run with train.ema");
  command->add_option("--tokens", options->tokens, "tokens to add")->check(CLI::Range(int64_t{1}, kMostTokens))->capture_default_str();
  command
      ->add_option("--temperature", options->generate.temperature,
                   "0: the most likely token every time; 1: as the model believes")
      ->capture_default_str();
  command->add_option("--top-k", options->generate.top_k, "draw among this many most likely tokens; 0: among all")
      ->capture_default_str();
  command->add_option("--seed", options->generate.seed, "of the draw")->check(CLI::NonNegativeNumber)->capture_default_str();
  command->footer("Example: weft generate runs/demo --prompt \"In the beginning\" --tokens 300\n");
  command->callback([options] { run_generate(*options); });
}

}  // namespace weft::cli
