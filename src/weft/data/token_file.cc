#include "weft/data/token_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "weft/core/error.h"
#include "weft/data/token_header.h"

namespace weft::data {

static_assert(std::endian::native == std::endian::little, "token files are mapped as they are: little endian");

TokenFormat token_format(const std::string& name) {
  if (name == "weft") return TokenFormat::weft;
  if (name == "raw-u16") return TokenFormat::raw_u16;
  throw ConfigError(
      fmt::format("token file format '{}' is unknown (weft, or raw-u16 for 16-bit ids without a header)", name));
}

int64_t sample_count(int64_t tokens, int64_t seq) {
  return tokens <= seq ? 0 : (tokens - 1) / seq;
}

struct TokenFile::Mapping {
  std::string path;
  TokenFileInfo info;
  const unsigned char* base = nullptr;
  size_t bytes = 0;
  size_t offset = 0;  ///< of the first token

  ~Mapping() {
    if (base) munmap(const_cast<unsigned char*>(base), bytes);
  }
  const unsigned char* tokens() const { return base + offset; }
};

namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(const std::string& path) : value_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (value_ < 0) throw ConfigError(fmt::format("cannot open token file {}: {}", path, std::strerror(errno)));
  }
  ~FileDescriptor() { close(value_); }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

TokenFileInfo raw_info(const std::string& path, size_t bytes, int64_t vocab) {
  if (bytes % 2 != 0) {
    throw ConfigError(
        fmt::format("{}: {} bytes are not a whole number of 16-bit tokens (is it really raw-u16?)", path, bytes));
  }
  if (vocab < 1 || vocab > 65536) {
    throw ConfigError(
        fmt::format("{}: a raw-u16 file does not say its vocabulary, and {} is none for 16-bit ids "
                    "(set model.vocab to 1 .. 65536)",
                    path, vocab));
  }
  return {.width = 2, .vocab = vocab, .count = static_cast<int64_t>(bytes / 2), .checksum = 0, .tokenizer = ""};
}

/// Index of the first id at or above vocab in [begin, begin + out.size()), or -1; copies them to out.
template <class Id>
int64_t copy_checked(const unsigned char* from, int64_t vocab, std::span<int64_t> out) {
  int64_t highest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    Id id;
    std::memcpy(&id, from + i * sizeof(Id), sizeof(Id));
    out[i] = static_cast<int64_t>(id);
    highest = std::max(highest, out[i]);
  }
  if (highest < vocab) return -1;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] >= vocab) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace

TokenFile TokenFile::open(const std::string& path, TokenFormat format, int64_t vocab) {
  const FileDescriptor file(path);
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw ConfigError(fmt::format("{} is no regular file, so it cannot be mapped as a token file", path));
  }
  auto mapping = std::make_shared<Mapping>();
  mapping->path = path;
  mapping->bytes = static_cast<size_t>(status.st_size);
  if (mapping->bytes == 0) throw ConfigError(fmt::format("token file {} is empty", path));
  void* base = mmap(nullptr, mapping->bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (base == MAP_FAILED) throw ConfigError(fmt::format("cannot map token file {}: {}", path, std::strerror(errno)));
  mapping->base = static_cast<const unsigned char*>(base);
  if (format == TokenFormat::raw_u16) {
    mapping->info = raw_info(path, mapping->bytes, vocab);
  } else {
    mapping->info = decode_header(path, {mapping->base, mapping->bytes});
    mapping->offset = kTokenHeaderBytes;
  }
  return TokenFile(std::move(mapping));
}

const std::string& TokenFile::path() const {
  return mapping_->path;
}
const TokenFileInfo& TokenFile::info() const {
  return mapping_->info;
}

void TokenFile::read(int64_t begin, std::span<int64_t> out) const {
  const auto& info = mapping_->info;
  const auto wanted = static_cast<int64_t>(out.size());
  if (begin < 0 || wanted > info.count || begin > info.count - wanted) {
    throw InternalError(fmt::format("{}: tokens [{}, {}) asked of {}", path(), begin, begin + wanted, info.count));
  }
  const unsigned char* from = mapping_->tokens() + static_cast<size_t>(begin) * info.width;
  const int64_t bad = info.width == 1   ? copy_checked<uint8_t>(from, info.vocab, out)
                      : info.width == 2 ? copy_checked<uint16_t>(from, info.vocab, out)
                                        : copy_checked<uint32_t>(from, info.vocab, out);
  if (bad >= 0) {
    throw ConfigError(
        fmt::format("{}: token {} has id {}, but the vocabulary has {} (damaged file, or another tokenizer's)", path(),
                    begin + bad, out[static_cast<size_t>(bad)], info.vocab));
  }
}

void TokenFile::check() const {
  const auto& info = mapping_->info;
  constexpr int64_t kPiece = 1 << 16;
  std::vector<int64_t> piece(kPiece);
  for (int64_t begin = 0; begin < info.count; begin += kPiece) {
    read(begin, std::span(piece).first(static_cast<size_t>(std::min(kPiece, info.count - begin))));
  }
  if (info.checksum == 0) return;
  const uint64_t found = XXH64(mapping_->tokens(), static_cast<size_t>(info.count) * info.width, 0);
  if (found != info.checksum) {
    throw ConfigError(
        fmt::format("{}: checksum of the tokens is {:016x}, the header says {:016x} (the file is damaged: "
                    "prepare it again)",
                    path(), found, info.checksum));
  }
}

}  // namespace weft::data
