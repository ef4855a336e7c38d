#include "weft/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "weft/checkpoint/safetensors_format.h"
#include "weft/core/error.h"

namespace weft::checkpoint {
namespace {

constexpr size_t kLongestHeader = 100'000'000;  ///< the reference implementation's limit

at::ScalarType dtype_of(const std::string& path, const std::string& tensor, const std::string& name) {
  for (const DtypeName& known : kDtypes)
    if (name == known.name) return known.type;
  fail(path, fmt::format("tensor {} has dtype \"{}\"; known are F64, F32, BF16, F16, I64, I32, U8 and BOOL", tensor, name));
}

/// JSON that refuses a name given twice, which the library would silently overwrite.
nlohmann::json parse_header(const std::string& path, const std::string& text) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::object_start) keys.emplace_back();
    if (event == nlohmann::json::parse_event_t::object_end) keys.pop_back();
    if (event == nlohmann::json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      fail(path, fmt::format("the header names {} twice", value.get<std::string>()));
    return true;
  };
  try {
    nlohmann::json header = nlohmann::json::parse(text, check);
    if (!header.is_object()) fail(path, "the header is no JSON object");
    return header;
  } catch (const nlohmann::json::exception& e) {
    fail(path, fmt::format("the header is no valid JSON ({})", e.what()));
  }
}

size_t non_negative(const std::string& path, const std::string& tensor, const nlohmann::json& value, const char* what) {
  if (!value.is_number_integer() || (!value.is_number_unsigned() && value.get<int64_t>() < 0))
    fail(path, fmt::format("tensor {}: {} {} is no non-negative integer", tensor, what, value.dump()));
  return value.get<size_t>();
}

}  // namespace

/// The whole file in memory, copy on write.
class SafetensorsFile::Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) fail(path, fmt::format("cannot be opened ({})", system_error()));
    if (!S_ISREG(status.st_mode)) fail(path, "is no regular file");
    size = static_cast<size_t>(status.st_size);
    if (size < kLengthBytes) fail(path, fmt::format("has {} bytes; a safetensors file has at least {}. Is it truncated?", size, kLengthBytes));
    void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.get(), 0);
    if (mapped == MAP_FAILED) fail(path, fmt::format("cannot be mapped ({})", system_error()));
    data = static_cast<char*>(mapped);
  }
  ~Mapping() { ::munmap(data, size); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data = nullptr;
  size_t size = 0;
};

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), mapping_(std::make_shared<Mapping>(path)) {
  uint64_t length = 0;
  std::memcpy(&length, mapping_->data, kLengthBytes);
  if (length > kLongestHeader || length > mapping_->size - kLengthBytes)
    fail(path, fmt::format("says that its header has {} bytes, but the file has {}. It is truncated, or no safetensors file.", length, mapping_->size));
  const std::string header(mapping_->data + kLengthBytes, length);
  read_header(header, kLengthBytes + length);
  check_sum(header);
}

void SafetensorsFile::check_sum(const std::string& header) const {
  const auto found = metadata_.find(kChecksumKey);
  if (found == metadata_.end()) return;
  const std::string& stated = found->second;
  const size_t kind = std::strlen(kChecksumKind), digits = std::strlen(kNoDigits);
  if (!stated.starts_with(kChecksumKind) || stated.size() != kind + digits)
    fail(path_, fmt::format("metadata {} = \"{}\" is not \"{}\" and {} digits: the file is damaged", kChecksumKey, stated, kChecksumKind, digits));
  std::string blank = header;
  if (const size_t at = blank.find(stated); at != std::string::npos) blank.replace(at + kind, digits, kNoDigits);
  Hash hash;
  hash.add(mapping_->data, kLengthBytes);
  hash.add(blank.data(), blank.size());
  hash.add(mapping_->data + kLengthBytes + blank.size(), mapping_->size - kLengthBytes - blank.size());
  if (kChecksumKind + hash.digits() != stated)
    fail(path_, fmt::format("the checksum of its contents is {}{}, but its metadata state {}: it was damaged on its way here, or another program "
                            "changed it and kept the metadata (then remove {} from them)", kChecksumKind, hash.digits(), stated, kChecksumKey));
}

void SafetensorsFile::read_header(const std::string& text, size_t data_begin) {
  const nlohmann::json header = parse_header(path_, text);
  const size_t data_size = mapping_->size - data_begin;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, entry] : value.items()) {
        if (!entry.is_string()) fail(path_, fmt::format("metadata {} is no text", key));
        metadata_.emplace(key, entry.get<std::string>());
      }
      continue;
    }
    if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() || !value.contains("shape") ||
        !value["shape"].is_array() || !value.contains("data_offsets") || !value["data_offsets"].is_array() || value["data_offsets"].size() != 2)
      fail(path_, fmt::format("tensor {} needs dtype, shape and two data_offsets", name));
    Entry entry{.dtype = dtype_of(path_, name, value["dtype"].get<std::string>()), .shape = {}, .begin = 0, .end = 0};
    size_t bytes = c10::elementSize(entry.dtype);
    for (const nlohmann::json& extent : value["shape"]) {
      const size_t n = non_negative(path_, name, extent, "extent");
      if (__builtin_mul_overflow(bytes, n, &bytes) || n > INT64_MAX) fail(path_, fmt::format("tensor {}: shape {} overflows", name, value["shape"].dump()));
      entry.shape.push_back(static_cast<int64_t>(n));
    }
    const size_t begin = non_negative(path_, name, value["data_offsets"][0], "offset");
    const size_t end = non_negative(path_, name, value["data_offsets"][1], "offset");
    if (begin > end || end > data_size)
      fail(path_, fmt::format("tensor {} lies at bytes {} to {} of {} bytes of data. Is the file truncated?", name, begin, end, data_size));
    if (end - begin != bytes)
      fail(path_, fmt::format("tensor {} has {} bytes, but its shape {} of {} needs {}", name, end - begin, value["shape"].dump(), value["dtype"].get<std::string>(), bytes));
    entry.begin = data_begin + begin;
    entry.end = data_begin + end;
    entries_.emplace(name, std::move(entry));
    names_.push_back(name);
  }
  const auto position = [&](const std::string& name) { return std::pair(entries_.at(name).begin, entries_.at(name).end); };
  std::sort(names_.begin(), names_.end(), [&](const auto& a, const auto& b) { return position(a) < position(b); });
  size_t covered = data_begin;
  for (const std::string& name : names_) {
    const Entry& entry = entries_.at(name);
    if (entry.begin != covered)
      fail(path_, fmt::format("tensor {} starts at byte {} of the data, the one before it ends at {}: they {}", name, entry.begin - data_begin,
                              covered - data_begin, entry.begin < covered ? "overlap" : "leave a hole"));
    covered = entry.end;
  }
  if (covered != mapping_->size) fail(path_, fmt::format("{} bytes after the last tensor belong to none", mapping_->size - covered));
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(path_, fmt::format("has no tensor {} (it has {} others)", name, names_.size()));
  const Entry& entry = found->second;
  const auto options = at::TensorOptions(entry.dtype);
  if (entry.begin == entry.end) return at::empty(entry.shape, options);
  char* data = mapping_->data + entry.begin;
  if (entry.begin % c10::elementSize(entry.dtype) == 0)
    return at::from_blob(data, entry.shape, [keep = mapping_](void*) {}, options);
  at::Tensor aligned = at::empty(entry.shape, options);
  std::memcpy(aligned.mutable_data_ptr(), data, entry.end - entry.begin);
  return aligned;
}

}  // namespace weft::checkpoint
