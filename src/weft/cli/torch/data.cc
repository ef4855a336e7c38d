// weft data prepare | inspect
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "weft/cli/torch/commands.h"
#include "weft/config/tokenizer.h"
#include "weft/core/error.h"
#include "weft/core/progress.h"
#include "weft/core/units.h"
#include "weft/data/prepare.h"
#include "weft/data/token_file.h"

namespace weft::cli {
namespace {

/// Tokens of the sample that `inspect` shows.
constexpr int64_t kShownTokens = 64;

void run_prepare(const data::PrepareOptions& options, bool json) {
  ProgressLine line;
  const data::PrepareResult result = data::prepare(options, [&](int64_t done, int64_t total) {
    const std::string of = total > 0 ? " of " + bytes_text(static_cast<double>(total)) : "";
    line.show(fmt::format("{}{} read", bytes_text(static_cast<double>(done)), of));
  });
  line.finish();
  for (const std::string& empty : result.empty_inputs) fmt::print(stderr, "weft: {} is empty\n", empty);
  for (const std::string& old : result.replaced) {
    const bool again = old == result.train_path || old == result.val_path;
    fmt::print(stderr, "weft: an earlier {} was {}\n", old, again ? "replaced" : "removed: this preparation keeps nothing for validation");
  }
  if (json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"bytes", result.bytes},
                                              {"tokenizer", options.tokenizer},
                                              {"train", {{"path", result.train_path}, {"tokens", result.train_tokens}}},
                                              {"val", {{"path", result.val_path}, {"tokens", result.val_tokens}}},
                                              {"empty_inputs", result.empty_inputs},
                                              {"replaced", result.replaced}}
                           .dump(2));
    return;
  }
  fmt::print("{}: {} tokens\n", result.train_path, result.train_tokens);
  if (!result.val_path.empty()) fmt::print("{}: {} tokens\n", result.val_path, result.val_tokens);
}

struct InspectOptions {
  std::string path, format = "weft";
  int64_t vocab = 0;
  bool check = false, json = false;
};

void run_inspect(const InspectOptions& options) {
  const auto file = data::TokenFile::open(options.path, data::token_format(options.format), options.vocab);
  if (options.check) file.check();
  const data::TokenFileInfo& info = file.info();
  std::vector<int64_t> first(static_cast<size_t>(std::min(kShownTokens, info.count)));
  file.read(0, first);
  nlohmann::ordered_json report{
      {"path", file.path()},         {"tokens", info.count},
      {"vocab", info.vocab},         {"bytes_per_token", info.width},
      {"tokenizer", info.tokenizer}, {"checksum", info.checksum ? fmt::format("{:016x}", info.checksum) : "none"},
      {"checked", options.check}};
  if (options.json) {
    report["first"] = first;
    fmt::print("{}\n", report.dump(2));
    return;
  }
  for (const auto& [key, value] : report.items())
    fmt::print("{:<16} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
  if (info.tokenizer.empty()) {
    fmt::print("{:<16} {}\n", "first", nlohmann::json(first).dump());
  } else {
    const std::string text =
        config::make_tokenizer(info.tokenizer)->decode(std::vector<uint32_t>(first.begin(), first.end()));
    // As a JSON string: control characters and cut characters stay visible and harmless.
    fmt::print("{:<16} {}\n", "first",
               nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
}

void add_prepare(CLI::App& data) {
  auto options = std::make_shared<data::PrepareOptions>();
  auto json = std::make_shared<bool>(false);
  CLI::App* command = data.add_subcommand("prepare", "Make train.bin and val.bin from text, in place of earlier ones");
  command->add_option("input", options->inputs, "text files, joined in this order; - is standard input")->required();
  command->add_option("--out", options->out, "folder for the token files")->required();
  command->add_option("--tokenizer", options->tokenizer, "bytes")->capture_default_str();
  command->add_option("--val-fraction", options->val_fraction, "last share of the tokens that is kept for validation")
      ->capture_default_str();
  command->add_flag("--json", *json, "print the result as JSON");
  command->footer("Example: weft data prepare book.txt --out data/book\n");
  command->callback([options, json] { run_prepare(*options, *json); });
}

void add_inspect(CLI::App& data) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = data.add_subcommand("inspect", "Show what a token file holds");
  command->add_option("file", options->path, "token file")->required();
  command->add_option("--format", options->format, "weft or raw-u16")->capture_default_str();
  command->add_option("--vocab", options->vocab, "vocabulary of a raw-u16 file");
  command->add_flag("--check", options->check, "read everything: every id below the vocabulary, checksum right");
  command->add_flag("--json", options->json, "print as JSON");
  command->footer("Example: weft data inspect data/book/train.bin --check\n");
  command->callback([options] { run_inspect(*options); });
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* data = app.add_subcommand("data", "Prepare and inspect token files");
  data->require_subcommand(1);
  add_prepare(*data);
  add_inspect(*data);
}

}  // namespace weft::cli
