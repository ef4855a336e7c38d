#include "weft/data/prepare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"
#include "weft/config/tokenizer.h"
#include "weft/core/error.h"
#include "weft/data/token_file.h"

namespace weft::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weft::testing::TempDir;

std::string write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::string text_of(const std::string& path) {
  const TokenFile file = TokenFile::open(path);
  file.check();
  std::vector<int64_t> ids(static_cast<size_t>(file.count()));
  file.read(0, ids);
  return config::make_tokenizer(file.info().tokenizer)->decode(std::vector<uint32_t>(ids.begin(), ids.end()));
}

TEST(Prepare, LastShareIsValidationAndNothingIsLost) {
  const TempDir dir;
  std::string text;
  for (int64_t i = 0; i < 400'000; ++i) text += std::to_string(i * 7919 % 100'003) + " ";  // over two pieces
  const auto a = write(dir / "a.txt", text.substr(0, 1'500'000)), b = write(dir / "b.txt", text.substr(1'500'000));
  std::vector<int64_t> seen;
  const auto result =
      prepare({.inputs = {a, b}, .out = dir / "deep/out", .val_fraction = 0.05}, [&](int64_t done, int64_t total) {
        seen.push_back(done);
        EXPECT_EQ(total, static_cast<int64_t>(text.size()));
      });
  EXPECT_EQ(result.bytes, static_cast<int64_t>(text.size()));
  EXPECT_EQ(result.val_tokens, std::llround(static_cast<double>(text.size()) * 0.05));
  EXPECT_EQ(text_of(result.train_path) + text_of(result.val_path), text);
  EXPECT_EQ(seen.back(), result.bytes);
  EXPECT_GE(seen.size(), 3u);
}

// Byte-order marks, a cut character, NUL, 10 MB without a space, only white space.
TEST(Prepare, OddBytesSurvive) {
  const TempDir dir;
  for (const std::string& text :
       {std::string("\xff\xfe\x41\x00", 4), std::string("\xe2\x82"), std::string("a\0b\0\0", 5),
        std::string(10'000'000, 'x'), std::string(" \n\t \r\n")}) {
    const auto result = prepare({.inputs = {write(dir / "odd", text)}, .out = dir / "out", .val_fraction = 0});
    EXPECT_TRUE(text_of(result.train_path) == text) << text.size();
    EXPECT_EQ(result.val_path, "");
  }
}

TEST(Prepare, EmptyInputsAreNamedAndDoNotEndTheJob) {
  const TempDir dir;
  const auto empty = write(dir / "empty", ""), full = write(dir / "full", "text");
  const auto result = prepare({.inputs = {empty, full, empty}, .out = dir / "out", .val_fraction = 0.5});
  EXPECT_THAT(result.empty_inputs, ElementsAre(empty, empty));
  EXPECT_EQ(text_of(result.train_path), "te");
  EXPECT_EQ(text_of(result.val_path), "xt");
}

TEST(Prepare, EarlierFilesAreReplacedTogether) {
  const TempDir dir;
  const auto first = write(dir / "first", "0123456789"), second = write(dir / "second", "abcdefgh");
  EXPECT_THAT(prepare({.inputs = {first}, .out = dir / "out", .val_fraction = 0.5}).replaced, ElementsAre());
  const auto both = prepare({.inputs = {second}, .out = dir / "out", .val_fraction = 0.5});
  EXPECT_THAT(both.replaced, ElementsAre(dir / "out/train.bin", dir / "out/val.bin"));
  EXPECT_EQ(text_of(dir / "out/val.bin"), "efgh");
  const auto one = prepare({.inputs = {first}, .out = dir / "out", .val_fraction = 0});
  EXPECT_THAT(one.replaced, ElementsAre(dir / "out/train.bin", dir / "out/val.bin"));
  EXPECT_FALSE(std::filesystem::exists(dir / "out/val.bin")) << "validation would be on another text";
  EXPECT_EQ(text_of(dir / "out/train.bin"), "0123456789");
  EXPECT_THROW(prepare({.inputs = {write(dir / "empty", "")}, .out = dir / "out"}), ConfigError);
  EXPECT_EQ(text_of(dir / "out/train.bin"), "0123456789");
}

TEST(Prepare, TwoAtATimeAreKeptApart) {
  const TempDir dir;
  TokenWriter busy(dir / "train.bin", 256, "bytes");
  try {
    prepare({.inputs = {write(dir / "text", "text")}, .out = dir.path(), .val_fraction = 0});
    ADD_FAILURE() << "another writer is at work";
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), HasSubstr("another process is writing it"));
  }
  const std::vector<uint32_t> tokens{1, 2, 3};
  busy.append(tokens);
  busy.finish();
  EXPECT_EQ(TokenFile::open(dir / "train.bin").count(), 3);
}

TEST(Prepare, ErrorsNameTheInputAndLeaveNoFiles) {
  const TempDir dir;
  const auto full = write(dir / "full", "text"), empty = write(dir / "empty", "");
  auto error = [&](const PrepareOptions& options) -> std::string {
    try {
      prepare(options);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(error({.inputs = {full, dir / "missing"}, .out = dir / "out"}),
              HasSubstr("cannot read " + (dir / "missing")));
  EXPECT_THAT(error({.inputs = {dir.path()}, .out = dir / "out"}), HasSubstr("is a folder"));
  EXPECT_THAT(error({.inputs = {empty}, .out = dir / "out"}), HasSubstr("no text to train on"));
  EXPECT_THAT(error({.inputs = {full}, .out = dir / "out", .tokenizer = "gpt5"}), HasSubstr("there is: bytes"));
  EXPECT_THAT(error({.inputs = {full}, .out = dir / "out", .val_fraction = 1.0}), HasSubstr("not in [0, 1)"));
  EXPECT_THAT(error({.inputs = {full}, .out = full}), HasSubstr("cannot make the folder"));
  EXPECT_TRUE(!std::filesystem::exists(dir / "out") || std::filesystem::is_empty(dir / "out"));
}

}  // namespace
}  // namespace weft::data
