#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "weft/checkpoint/safetensors.h"
#include "weft/checkpoint/safetensors_format.h"
#include "weft/core/error.h"

namespace weft::checkpoint {
namespace {

constexpr size_t kHeaderAlignment = 8;

const char* name_of(const std::string& path, const TensorEntry& tensor) {
  for (const DtypeName& known : kDtypes)
    if (tensor.dtype == known.type) return known.name;
  fail(path, fmt::format("tensor {} has dtype {}, which safetensors cannot hold here; convert it first", tensor.name, c10::toString(tensor.dtype)));
}

void write_all(int fd, off_t offset, const void* data, size_t bytes, const std::string& path) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(fd, next, bytes, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(path, fmt::format("cannot be written ({})", system_error()));
    next += written;
    offset += written;
    bytes -= static_cast<size_t>(written);
  }
}

/// Of the whole file, read back from the page cache: tensors may have been written in any order.
std::string hash_of(int fd, size_t bytes, const std::string& path) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) fail(path, fmt::format("cannot be mapped ({})", system_error()));
  Hash hash;
  hash.add(mapped, bytes);
  ::munmap(mapped, bytes);
  return hash.digits();
}

}  // namespace

struct SafetensorsWriter::File {
  struct Place {
    TensorEntry entry;
    size_t begin, bytes;
    bool written = false;
  };

  std::string partial;
  FileDescriptor descriptor;
  std::unordered_map<std::string, Place> places;
  size_t digits = 0, end = 0;  ///< bytes from the start of the file: of the checksum's digits; of everything

  explicit File(const std::string& path)
      : partial(fmt::format("{}.{}.partial", path, ::getpid())), descriptor(::open(partial.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (descriptor.get() < 0) fail(path, fmt::format("cannot be created ({})", system_error()));
  }
  ~File() { ::unlink(partial.c_str()); }  // finish() has renamed it
};

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<TensorEntry>& tensors, const Metadata& metadata) : path_(path) {
  std::vector<TensorEntry> order = tensors;
  std::stable_sort(order.begin(), order.end(),
                   [](const TensorEntry& a, const TensorEntry& b) { return c10::elementSize(a.dtype) > c10::elementSize(b.dtype); });
  Metadata with_checksum = metadata;
  with_checksum[kChecksumKey] = std::string(kChecksumKind) + kNoDigits;
  nlohmann::ordered_json header{{"__metadata__", with_checksum}};
  std::unordered_map<std::string, File::Place> places;
  size_t offset = 0;
  for (const TensorEntry& entry : order) {
    const size_t bytes = c10::elementSize(entry.dtype) * static_cast<size_t>(c10::multiply_integers(entry.shape));
    if (!places.try_emplace(entry.name, File::Place{.entry = entry, .begin = offset, .bytes = bytes}).second)
      fail(path, fmt::format("two tensors are called {}", entry.name));
    header[entry.name] = {{"dtype", name_of(path, entry)}, {"shape", entry.shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  const uint64_t length = text.size();
  for (auto& [name, place] : places) place.begin += kLengthBytes + length;
  file_ = std::make_unique<File>(path);
  file_->places = std::move(places);
  file_->digits = kLengthBytes + text.find(with_checksum[kChecksumKey]) + std::strlen(kChecksumKind);
  file_->end = kLengthBytes + length + offset;
  write_all(file_->descriptor.get(), 0, &length, kLengthBytes, path_);
  write_all(file_->descriptor.get(), kLengthBytes, text.data(), text.size(), path_);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(const std::string& name, const at::Tensor& tensor) {
  const auto found = file_->places.find(name);
  if (found == file_->places.end()) throw InternalError(fmt::format("{}: tensor {} was not stated", path_, name));
  File::Place& place = found->second;
  if (place.written || tensor.scalar_type() != place.entry.dtype || tensor.sizes() != place.entry.shape)
    throw InternalError(fmt::format("{}: tensor {} comes {}", path_, name, place.written ? "twice" : "with another shape or dtype than stated"));
  const at::Tensor host = tensor.detach().cpu().contiguous();
  write_all(file_->descriptor.get(), static_cast<off_t>(place.begin), host.const_data_ptr(), host.nbytes(), path_);
  place.written = true;
}

void SafetensorsWriter::finish() {
  for (const auto& [name, place] : file_->places)
    if (!place.written) throw InternalError(fmt::format("{}: tensor {} was stated, but not written", path_, name));
  const int fd = file_->descriptor.get();
  const std::string digits = hash_of(fd, file_->end, path_);
  write_all(fd, static_cast<off_t>(file_->digits), digits.data(), digits.size(), path_);
  if (::fsync(fd) != 0) fail(path_, fmt::format("cannot be flushed to disk ({})", system_error()));
  if (::rename(file_->partial.c_str(), path_.c_str()) != 0) fail(path_, fmt::format("cannot be renamed ({})", system_error()));
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata) {
  std::vector<TensorEntry> entries;
  for (const NamedTensor& t : tensors) entries.push_back({t.name, t.tensor.scalar_type(), t.tensor.sizes().vec()});
  SafetensorsWriter writer(path, entries, metadata);
  for (const NamedTensor& t : tensors) writer.write(t.name, t.tensor);
  writer.finish();
}

}  // namespace weft::checkpoint
