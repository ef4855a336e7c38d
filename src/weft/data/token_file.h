// Token files: a header and the ids of a text, memory-mapped.
//
// Layout, all numbers little endian:
//   offset  bytes  field
//        0      8  magic "WEFTTOKN"
//        8      4  version, 1
//       12      4  bytes per token: 1, 2 or 4 (unsigned). The reader obeys it; width never follows from the vocabulary.
//       16      8  vocabulary size; every id is below it
//       24      8  number of tokens
//       32      8  XXH64 (seed 0) of the token bytes; 0 = not stored
//       40      8  offset of the first token, 128 in version 1
//       48     80  tokenizer id, UTF-8, padded with zero bytes
//      128      -  tokens; the file ends with the last one
//
// Files of raw 16-bit ids without a header (nanoGPT's train.bin) are read when the caller says so.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace weft::data {

enum class TokenFormat {
  weft,     ///< header as above
  raw_u16,  ///< little-endian 16-bit ids from the first byte to the last
};

/// "weft" or "raw-u16"; ConfigError for anything else.
TokenFormat token_format(const std::string& name);

struct TokenFileInfo {
  int width = 2;          ///< bytes per token: 1, 2 or 4
  int64_t vocab = 0;      ///< ids are below it
  int64_t count = 0;      ///< tokens
  uint64_t checksum = 0;  ///< XXH64 of the token bytes; 0 = not stored
  std::string tokenizer;  ///< id, for instance "bytes"; empty when unknown
};

/// A token file, mapped read-only. A cheap value: copies share the mapping. Safe to read from several threads.
class TokenFile {
 public:
  /// `vocab` is needed for raw_u16, whose files do not say it; for weft files it is ignored.
  /// ConfigError: missing, truncated, wrong magic or version, size that contradicts the header.
  static TokenFile open(const std::string& path, TokenFormat format = TokenFormat::weft, int64_t vocab = 0);

  const std::string& path() const;
  const TokenFileInfo& info() const;
  int64_t count() const { return info().count; }

  /// Copies tokens [begin, begin + out.size()). ConfigError names the position of an id that the vocabulary does not
  /// have: reads are checked always, so that a damaged file never reaches an embedding table.
  void read(int64_t begin, std::span<int64_t> out) const;

  /// Reads everything: every id below the vocabulary, checksum right where one is stored. ConfigError otherwise.
  void check() const;

 private:
  struct Mapping;
  explicit TokenFile(std::shared_ptr<const Mapping> mapping) : mapping_(std::move(mapping)) {}
  std::shared_ptr<const Mapping> mapping_;
};

/// Writes a token file as a stream. The file appears under its name when finish() returns; an unfinished writer removes
/// what it wrote. ConfigError when another process writes the same file. Width: the smallest that holds vocab - 1.
class TokenWriter {
 public:
  TokenWriter(std::string path, int64_t vocab, std::string tokenizer);
  ~TokenWriter();
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  /// ConfigError for an id at or above the vocabulary, or when the disk is full.
  void append(std::span<const uint32_t> tokens);
  /// Removes the last `count` tokens and returns them through `receive`, in order, in pieces.
  void split_off(int64_t count, TokenWriter& receive);
  /// seal(), then publish().
  void finish();
  /// Header, checksum, fsync: all that can fail but the rename. Nothing can be appended any more.
  void seal();
  /// The sealed file appears under its name.
  void publish();

  int64_t count() const { return info_.count; }

 private:
  void open_partial();
  void flush();
  [[noreturn]] void fail(const std::string& doing) const;

  std::string path_, partial_path_;
  TokenFileInfo info_;
  int file_ = -1;
  std::vector<unsigned char> buffer_;
};

/// Samples of a token file for next-token prediction: windows of seq + 1 tokens that start every seq tokens, so that
/// neighbours share one token and each token but the first is a target exactly once. The rest that fills no window is
/// left out. (count - 1) / seq, rounded down.
int64_t sample_count(int64_t tokens, int64_t seq);

}  // namespace weft::data
