// Safetensors files: named tensors behind a JSON header (Hugging Face's format, readable by any tool).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/parallel/data_parallel.h"

namespace weft::checkpoint {

using Metadata = std::map<std::string, std::string>;

/// Key of the metadata under which write_safetensors keeps "xxh64:" and 16 hexadecimal digits: the XXH64 hash (seed 0) of the whole
/// file, in which these digits themselves are taken to be zeros.
inline constexpr const char* kChecksumKey = "weft.checksum";

/// An open file. Dtypes F64, F32, BF16, F16, I64, I32, U8, BOOL.
class SafetensorsFile {
 public:
  /// Maps the file and checks all of it: header, dtypes, shapes, that the tensors' bytes cover the data exactly once, and the
  /// checksum if its metadata hold one (kChecksumKey; files of other programs have none). ConfigError names what is wrong.
  explicit SafetensorsFile(const std::string& path);

  /// In the order in which they lie in the file.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  /// A CPU tensor over the mapped file, which lives as long as the tensor; writing to it changes memory, not the file.
  /// ConfigError if there is none of that name.
  at::Tensor tensor(const std::string& name) const;
  const Metadata& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

 private:
  class Mapping;
  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    size_t begin, end;  ///< bytes from the start of the file
  };

  void read_header(const std::string& text, size_t data_begin);
  void check_sum(const std::string& header) const;

  std::string path_;
  std::shared_ptr<Mapping> mapping_;
  std::map<std::string, Entry> entries_;
  std::vector<std::string> names_;
  Metadata metadata_;
};

/// What a file's header says of a tensor.
struct TensorEntry {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// A file written tensor by tensor, in any order, so that nobody need hold all of it: to a temporary file beside `path`, flushed to
/// disk and renamed by finish(), so that `path` is always whole; without finish() nothing is left behind. Wider dtypes come first,
/// which keeps every tensor aligned. A checksum is added to the metadata. ConfigError when the disk refuses.
class SafetensorsWriter {
 public:
  /// ConfigError on duplicate names and unsupported dtypes.
  SafetensorsWriter(const std::string& path, const std::vector<TensorEntry>& tensors, const Metadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// `tensor` (any device and strides) under its name. InternalError unless dtype and shape are those stated, and when it comes twice.
  void write(const std::string& name, const at::Tensor& tensor);
  /// InternalError when a tensor is missing.
  void finish();

 private:
  struct File;
  std::string path_;
  std::unique_ptr<File> file_;
};

/// All at once.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata = {});

}  // namespace weft::checkpoint
