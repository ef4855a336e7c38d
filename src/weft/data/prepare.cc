#include "weft/data/prepare.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "weft/config/tokenizer.h"
#include "weft/core/error.h"
#include "weft/data/token_file.h"

namespace weft::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPieceBytes = 1 << 20;

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_input(const std::string& path) {
  if (path == "-") return {stdin, [](std::FILE*) { return 0; }};
  if (fs::is_directory(path)) throw ConfigError(fmt::format("{} is a folder; name the text files in it", path));
  File file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw ConfigError(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
  return file;
}

/// Bytes of all inputs, or 0 if one has no size. Fails before anything is written when an input cannot be read.
int64_t total_bytes(const std::vector<std::string>& inputs) {
  int64_t total = 0;
  bool known = true;
  for (const std::string& path : inputs) {
    open_input(path);
    if (path != "-" && fs::is_regular_file(path)) {
      total += static_cast<int64_t>(fs::file_size(path));
    } else {
      known = false;
    }
  }
  return known ? total : 0;
}

void encode_input(const std::string& path, const config::Tokenizer& tokenizer, TokenWriter& writer,
                  PrepareResult& result, const std::function<void()>& piece_done) {
  const File file = open_input(path);
  const int64_t before = result.bytes;
  std::string text(kPieceBytes, '\0');
  std::vector<uint32_t> tokens;
  while (const size_t got = std::fread(text.data(), 1, text.size(), file.get())) {
    tokens.clear();
    tokenizer.encode(std::string_view(text).substr(0, got), tokens);
    writer.append(tokens);
    result.bytes += static_cast<int64_t>(got);
    piece_done();
  }
  if (std::ferror(file.get())) throw ConfigError(fmt::format("reading {} failed: {}", path, std::strerror(errno)));
  if (result.bytes == before) result.empty_inputs.push_back(path);
}

}  // namespace

PrepareResult prepare(const PrepareOptions& options, const PrepareProgress& progress) {
  if (!(options.val_fraction >= 0 && options.val_fraction < 1)) {
    throw ConfigError(fmt::format("validation fraction {} is not in [0, 1)", options.val_fraction));
  }
  const auto tokenizer = config::make_tokenizer(options.tokenizer);
  const int64_t total = total_bytes(options.inputs);
  std::error_code failure;
  fs::create_directories(options.out, failure);
  if (failure) throw ConfigError(fmt::format("cannot make the folder {}: {}", options.out, failure.message()));

  PrepareResult result;
  result.train_path = (fs::path(options.out) / "train.bin").string();
  const std::string val_path = (fs::path(options.out) / "val.bin").string();
  TokenWriter train(result.train_path, tokenizer->vocab(), tokenizer->id());
  for (const std::string& input : options.inputs) {
    encode_input(input, *tokenizer, train, result, [&] {
      if (progress) progress(result.bytes, total);
    });
  }
  const int64_t val_tokens = std::llround(static_cast<double>(train.count()) * options.val_fraction);
  if (train.count() == val_tokens)
    throw ConfigError(fmt::format("no text to train on: {} bytes in all inputs", result.bytes));
  std::optional<TokenWriter> val;
  if (val_tokens > 0) {
    val.emplace(val_path, tokenizer->vocab(), tokenizer->id());
    train.split_off(val_tokens, *val);
    val->seal();
    result.val_path = val_path;
  }
  train.seal();
  // Whoever stops us here leaves old files, none, or new ones, but never an old one beside a new one.
  for (const std::string& old : {result.train_path, val_path}) {
    if (fs::exists(old)) result.replaced.push_back(old);
  }
  fs::remove(val_path, failure);
  if (failure) throw ConfigError(fmt::format("cannot replace {}: {}", val_path, failure.message()));
  train.publish();
  if (val) val->publish();
  result.train_tokens = train.count();
  result.val_tokens = val_tokens;
  return result;
}

}  // namespace weft::data
