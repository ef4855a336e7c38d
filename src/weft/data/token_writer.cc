#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "weft/core/error.h"
#include "weft/data/token_file.h"
#include "weft/data/token_header.h"

namespace weft::data {
namespace {

constexpr size_t kBufferBytes = 1 << 20;
constexpr int64_t kLargestVocab = int64_t{1} << 32;

int width_for(int64_t vocab) {
  return vocab <= 256 ? 1 : vocab <= 65536 ? 2 : 4;
}

}  // namespace

TokenWriter::TokenWriter(std::string path, int64_t vocab, std::string tokenizer)
    : path_(std::move(path)), partial_path_(path_ + ".partial") {
  if (vocab < 1 || vocab > kLargestVocab)
    throw ConfigError(fmt::format("vocabulary {}: 1 .. {} fit a token file", vocab, kLargestVocab));
  info_.vocab = vocab;
  info_.width = width_for(vocab);
  info_.tokenizer = std::move(tokenizer);
  const auto header = encode_header(info_);
  open_partial();
  buffer_.reserve(kBufferBytes);
  buffer_.assign(header.begin(), header.end());
}

// Locked, so that two writers do not mix their tokens. The file that was opened may have got its final name, or have been removed, by
// the time it is locked: then it is no longer the partial one.
void TokenWriter::open_partial() {
  for (;;) {
    file_ = open(partial_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) fail("create");
    if (flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      close(std::exchange(file_, -1));
      throw ConfigError(fmt::format("{}: another process is writing it; wait for that one, or give this one another folder", path_));
    }
    struct stat opened {}, named {};
    if (fstat(file_, &opened) == 0 && stat(partial_path_.c_str(), &named) == 0 && opened.st_ino == named.st_ino) break;
    close(std::exchange(file_, -1));
  }
  if (ftruncate(file_, 0) != 0) fail("empty");
}

TokenWriter::~TokenWriter() {
  if (file_ < 0) return;
  close(file_);
  unlink(partial_path_.c_str());
}

void TokenWriter::fail(const std::string& doing) const {
  throw ConfigError(fmt::format("cannot {} {}: {}", doing, partial_path_, std::strerror(errno)));
}

void TokenWriter::flush() {
  const unsigned char* from = buffer_.data();
  size_t left = buffer_.size();
  while (left > 0) {
    const ssize_t done = write(file_, from, left);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("write");
    from += done;
    left -= static_cast<size_t>(done);
  }
  buffer_.clear();
}

void TokenWriter::append(std::span<const uint32_t> tokens) {
  for (const uint32_t token : tokens) {
    if (token >= info_.vocab) {
      throw ConfigError(
          fmt::format("{}: token {} has id {}, but the vocabulary has {}", path_, info_.count, token, info_.vocab));
    }
    if (buffer_.size() + sizeof(token) > kBufferBytes) flush();
    for (int byte = 0; byte < info_.width; ++byte) buffer_.push_back(static_cast<unsigned char>(token >> (8 * byte)));
    ++info_.count;
  }
}

void TokenWriter::split_off(int64_t count, TokenWriter& receive) {
  if (count < 0 || count > info_.count || receive.info_.vocab != info_.vocab) {
    throw InternalError(fmt::format("split_off({}) of {} tokens", count, info_.count));
  }
  flush();
  const auto width = static_cast<size_t>(info_.width);
  auto at = static_cast<off_t>(kTokenHeaderBytes + static_cast<size_t>(info_.count - count) * width);
  const off_t keep = at;
  std::vector<unsigned char> bytes(kBufferBytes);
  std::vector<uint32_t> tokens;
  for (size_t left = static_cast<size_t>(count) * width; left > 0;) {
    const size_t want = std::min(left, bytes.size());
    const ssize_t got = pread(file_, bytes.data(), want, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail("read back");
    const size_t whole = static_cast<size_t>(got) / width;
    tokens.assign(whole, 0);
    for (size_t i = 0; i < whole; ++i) std::memcpy(&tokens[i], bytes.data() + i * width, width);
    receive.append(tokens);
    at += static_cast<off_t>(whole * width);
    left -= whole * width;
  }
  if (ftruncate(file_, keep) != 0 || lseek(file_, keep, SEEK_SET) < 0) fail("shorten");
  info_.count -= count;
}

void TokenWriter::finish() {
  seal();
  publish();
}

void TokenWriter::seal() {
  flush();
  // Hashed from the file: split_off shortened it, and a streaming hash cannot forget.
  std::unique_ptr<XXH64_state_t, XXH_errorcode (*)(XXH64_state_t*)> state(XXH64_createState(), &XXH64_freeState);
  XXH64_reset(state.get(), 0);
  std::vector<unsigned char> bytes(kBufferBytes);
  for (auto at = static_cast<off_t>(kTokenHeaderBytes);;) {
    const ssize_t got = pread(file_, bytes.data(), bytes.size(), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read back");
    if (got == 0) break;
    XXH64_update(state.get(), bytes.data(), static_cast<size_t>(got));
    at += got;
  }
  info_.checksum = XXH64_digest(state.get());
  const auto header = encode_header(info_);
  if (pwrite(file_, header.data(), header.size(), 0) != static_cast<ssize_t>(header.size()))
    fail("write the header of");
  if (fsync(file_) != 0) fail("fsync");
}

void TokenWriter::publish() {
  if (std::rename(partial_path_.c_str(), path_.c_str()) != 0) fail("rename");
  close(file_);
  file_ = -1;
}

}  // namespace weft::data
