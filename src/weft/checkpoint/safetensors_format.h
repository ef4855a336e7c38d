// What reading and writing safetensors files share.
#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "weft/core/error.h"

namespace weft::checkpoint {

static_assert(std::endian::native == std::endian::little, "safetensors holds little-endian numbers");

inline constexpr size_t kLengthBytes = 8;
inline constexpr const char* kChecksumKind = "xxh64:";
inline constexpr const char* kNoDigits = "0000000000000000";

struct DtypeName {
  const char* name;
  at::ScalarType type;
};
inline constexpr std::array<DtypeName, 8> kDtypes{{{"F64", at::kDouble}, {"F32", at::kFloat}, {"BF16", at::kBFloat16}, {"F16", at::kHalf},
                                            {"I64", at::kLong}, {"I32", at::kInt}, {"U8", at::kByte}, {"BOOL", at::kBool}}};

[[noreturn]] inline void fail(const std::string& path, const std::string& what) {
  throw ConfigError(fmt::format("{}: {}", path, what));
}

inline std::string system_error() { return std::strerror(errno); }

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class Hash {
 public:
  Hash() : state_(XXH64_createState(), &XXH64_freeState) { XXH64_reset(state_.get(), 0); }
  void add(const void* data, size_t bytes) { XXH64_update(state_.get(), data, bytes); }
  std::string digits() const { return fmt::format("{:016x}", XXH64_digest(state_.get())); }

 private:
  std::unique_ptr<XXH64_state_t, XXH_errorcode (*)(XXH64_state_t*)> state_;
};

}  // namespace weft::checkpoint
