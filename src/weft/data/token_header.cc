#include "weft/data/token_header.h"

#include <fmt/format.h>

#include <cstring>

#include "weft/core/error.h"

namespace weft::data {
namespace {

constexpr char kMagic[] = "WEFTTOKN";
constexpr uint32_t kVersion = 1;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t width;
  uint64_t vocab;
  uint64_t count;
  uint64_t checksum;
  uint64_t offset;
  char tokenizer[80];
};
static_assert(sizeof(Header) == kTokenHeaderBytes);

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw ConfigError(fmt::format("{} is no usable token file: {}", path, why));
}

}  // namespace

std::array<unsigned char, kTokenHeaderBytes> encode_header(const TokenFileInfo& info) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(header.magic));
  header.version = kVersion;
  header.width = static_cast<uint32_t>(info.width);
  header.vocab = static_cast<uint64_t>(info.vocab);
  header.count = static_cast<uint64_t>(info.count);
  header.checksum = info.checksum;
  header.offset = kTokenHeaderBytes;
  if (info.tokenizer.size() >= sizeof(header.tokenizer)) {
    throw ConfigError(fmt::format("tokenizer id '{}' has {} bytes; a token file's header holds {}", info.tokenizer,
                                  info.tokenizer.size(), sizeof(header.tokenizer) - 1));
  }
  std::memcpy(header.tokenizer, info.tokenizer.data(), info.tokenizer.size());
  std::array<unsigned char, kTokenHeaderBytes> bytes;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

TokenFileInfo decode_header(const std::string& path, std::span<const unsigned char> file) {
  if (file.size() < sizeof(Header::magic) || std::memcmp(file.data(), kMagic, sizeof(Header::magic)) != 0) {
    refuse(path,
           "it does not start with WEFTTOKN (made by `weft data prepare`? a file of bare 16-bit ids needs "
           "data.format = \"raw-u16\")");
  }
  if (file.size() < kTokenHeaderBytes) {
    refuse(path, fmt::format("{} bytes are less than its header of {} (truncated)", file.size(), kTokenHeaderBytes));
  }
  Header header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (header.version != kVersion) {
    refuse(path, fmt::format("version {}; this Weft reads version {}", header.version, kVersion));
  }
  if (header.width != 1 && header.width != 2 && header.width != 4) {
    refuse(path, fmt::format("{} bytes per token; 1, 2 and 4 exist", header.width));
  }
  const uint64_t widest = uint64_t{1} << (8 * header.width);
  if (header.vocab < 1 || header.vocab > widest) {
    refuse(path, fmt::format("vocabulary {} with {} bytes per token (1 .. {})", header.vocab, header.width, widest));
  }
  if (header.offset != kTokenHeaderBytes)
    refuse(path, fmt::format("tokens start at {}, not {}", header.offset, kTokenHeaderBytes));
  const uint64_t stored = file.size() - kTokenHeaderBytes;
  if (stored % header.width != 0 || stored / header.width != header.count) {
    refuse(path, fmt::format("the header counts {} tokens of {} bytes, but {} bytes follow it ({})", header.count,
                             header.width, stored,
                             stored / header.width < header.count ? "truncated" : "something was appended"));
  }
  const size_t length = strnlen(header.tokenizer, sizeof(header.tokenizer));
  return {.width = static_cast<int>(header.width),
          .vocab = static_cast<int64_t>(header.vocab),
          .count = static_cast<int64_t>(header.count),
          .checksum = header.checksum,
          .tokenizer = std::string(header.tokenizer, length)};
}

}  // namespace weft::data
