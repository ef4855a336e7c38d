#include "weft/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/message.h"
#include "tests/support/temp_dir.h"
#include "weft/core/error.h"

namespace weft::data {
namespace {

using ::testing::HasSubstr;
using ::weft::testing::TempDir;

std::string write_tokens(const TempDir& dir, int64_t vocab, const std::vector<uint32_t>& tokens,
                         const std::string& name = "t.bin") {
  TokenWriter writer(dir / name, vocab, "test");
  writer.append(tokens);
  writer.finish();
  return dir / name;
}

std::vector<int64_t> all_of(const TokenFile& file) {
  std::vector<int64_t> out(static_cast<size_t>(file.count()));
  file.read(0, out);
  return out;
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(TokenFile, WidthIsTheSmallestThatHoldsTheVocabulary) {
  const TempDir dir;
  struct Case {
    int64_t vocab;
    int width;
  };
  for (const auto& [vocab, width] :
       {Case{1, 1}, {255, 1}, {256, 1}, {257, 2}, {65499, 2}, {65500, 2}, {65535, 2}, {65536, 2}, {65537, 4}}) {
    const auto last = static_cast<uint32_t>(vocab - 1);
    const auto file = TokenFile::open(write_tokens(dir, vocab, {0, last, 0}));
    EXPECT_EQ(file.info().width, width) << vocab;
    EXPECT_EQ(file.info().vocab, vocab);
    EXPECT_EQ(file.info().tokenizer, "test");
    EXPECT_EQ(all_of(file), (std::vector<int64_t>{0, last, 0})) << vocab;
    EXPECT_EQ(std::filesystem::file_size(file.path()), 128u + 3u * width);
    file.check();
  }
}

// 70,000 in 16 bits would come back as 4,464.
TEST(TokenFile, IdsThatDoNotFitAreRefusedByTheWriter) {
  const TempDir dir;
  TokenWriter writer(dir / "t.bin", 65536, "test");
  const std::vector<uint32_t> tokens{1, 65535, 70000};
  EXPECT_THAT(testing::config_error([&] { writer.append(tokens); }),
              HasSubstr("token 2 has id 70000, but the vocabulary has 65536"));
}

TEST(TokenFile, ReaderObeysTheWidthOfTheHeaderNotTheVocabulary) {
  const TempDir dir;
  const auto path = write_tokens(dir, 70000, {69999, 3});
  auto bytes = bytes_of(path);
  bytes[16] = 10, bytes[17] = bytes[18] = 0;  // vocabulary 10 in a 4-byte file
  write_bytes(path, bytes);
  const auto file = TokenFile::open(path);
  EXPECT_EQ(file.info().width, 4);
  EXPECT_EQ(file.count(), 2);
  EXPECT_THAT(testing::config_error([&] { file.check(); }), HasSubstr("token 0 has id 69999, but the vocabulary has 10"));
  std::vector<int64_t> one(1);
  file.read(1, one);
  EXPECT_EQ(one[0], 3);
}

TEST(TokenFile, DamagedFilesAreRefusedWithTheReason) {
  const TempDir dir;
  const auto path = write_tokens(dir, 256, {1, 2, 3, 4});
  const auto good = bytes_of(path);
  auto open_with = [&](const std::string& bytes) {
    write_bytes(path, bytes);
    return testing::config_error([&] { TokenFile::open(path); });
  };
  EXPECT_THAT(open_with(""), HasSubstr("is empty"));
  EXPECT_THAT(open_with("WEFT"), HasSubstr("does not start with WEFTTOKN"));
  EXPECT_THAT(open_with(std::string(200, 'x')), HasSubstr("raw-u16"));
  EXPECT_THAT(open_with(good.substr(0, 100)), HasSubstr("truncated"));
  EXPECT_THAT(open_with(good.substr(0, good.size() - 1)),
              HasSubstr("counts 4 tokens of 1 bytes, but 3 bytes follow it (truncated)"));
  EXPECT_THAT(open_with(good + "x"), HasSubstr("something was appended"));
  auto changed = good;
  changed[8] = 9;
  EXPECT_THAT(open_with(changed), HasSubstr("version 9"));
  changed = good;
  changed[12] = 3;
  EXPECT_THAT(open_with(changed), HasSubstr("3 bytes per token"));
  changed = good;
  changed[129] = 77;
  write_bytes(path, changed);
  EXPECT_THAT(testing::config_error([&] { TokenFile::open(path).check(); }), HasSubstr("checksum"));
  EXPECT_THAT(testing::config_error([&] { TokenFile::open(dir / "missing.bin"); }), HasSubstr("No such file"));
  EXPECT_THAT(testing::config_error([&] { TokenFile::open(dir.path()); }), HasSubstr("no regular file"));
}

TEST(TokenFile, ReadsRaw16BitFiles) {
  const TempDir dir;
  const auto path = dir / "raw.bin";
  write_bytes(path, std::string("\x50\xc4\x01\x00\xff\xff", 6));  // 50256, 1, 65535
  EXPECT_EQ(all_of(TokenFile::open(path, TokenFormat::raw_u16, 65536)), (std::vector<int64_t>{50256, 1, 65535}));
  const auto file = TokenFile::open(path, TokenFormat::raw_u16, 50257);
  EXPECT_THAT(testing::config_error([&] { file.check(); }), HasSubstr("token 2 has id 65535, but the vocabulary has 50257"));
  EXPECT_THAT(testing::config_error([&] { TokenFile::open(path, TokenFormat::raw_u16); }), HasSubstr("model.vocab"));
  write_bytes(path, "odd");
  EXPECT_THAT(testing::config_error([&] { TokenFile::open(path, TokenFormat::raw_u16, 256); }),
              HasSubstr("3 bytes are not a whole number"));
}

TEST(TokenWriter, UnfinishedLeavesNothingBehind) {
  const TempDir dir;
  {
    TokenWriter writer(dir / "t.bin", 256, "test");
    writer.append(std::vector<uint32_t>{1, 2});
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(TokenWriter, SplitOffMovesTheTail) {
  const TempDir dir;
  std::vector<uint32_t> tokens(1'300'000);  // five buffers of 4-byte ids
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint32_t>(i * 7 % 100000);
  TokenWriter train(dir / "train.bin", 100000, "test"), val(dir / "val.bin", 100000, "test");
  train.append(tokens);
  train.split_off(300'001, val);
  train.append(std::vector<uint32_t>{5});
  train.finish();
  val.finish();
  const auto head = TokenFile::open(dir / "train.bin"), tail = TokenFile::open(dir / "val.bin");
  head.check();
  tail.check();
  auto joined = all_of(head), rest = all_of(tail);
  EXPECT_EQ(joined.back(), 5);
  joined.pop_back();
  joined.insert(joined.end(), rest.begin(), rest.end());
  EXPECT_EQ(joined, std::vector<int64_t>(tokens.begin(), tokens.end()));
  EXPECT_EQ(rest.size(), 300'001u);
}

// Unsigned arithmetic would give 18446744073709551609 samples for 10 tokens and seq 16.
TEST(Samples, CountsNeverUnderflow) {
  EXPECT_EQ(sample_count(0, 16), 0);
  EXPECT_EQ(sample_count(10, 16), 0);
  EXPECT_EQ(sample_count(16, 16), 0);
  EXPECT_EQ(sample_count(17, 16), 1);
  EXPECT_EQ(sample_count(32, 16), 1);
  EXPECT_EQ(sample_count(33, 16), 2);
}

}  // namespace
}  // namespace weft::data
