// An optimizer's state in a file, streamed piece by piece around the update.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/memory/scratch_file.h"

namespace weft::optim {

struct StateFileOptions {
  std::string dir;                       ///< of the file; on the disk that is to hold the state
  int64_t buffer_bytes = int64_t{16} << 20;  ///< of one buffer, at most
  int64_t buffers = 4;                   ///< at least 3: one is updated, one written, the others read ahead
  std::string what = "the optimizer's state";  ///< for messages
};

/// Holds, for each of a list of parameters, some tensors of as many elements (or one entry per block of elements). Numbers are
/// those of an update in memory: pieces are cut at multiples of a granule, and an update treats elements alike.
class StateFile {
 public:
  struct Kind {
    at::ScalarType dtype = at::kFloat;
    int64_t block = 1;  ///< elements of the parameter per entry
  };
  struct Owner {
    int64_t numel = 0;
    std::vector<Kind> tensors;
    int64_t granule = 1;  ///< pieces begin at multiples of it; itself a multiple of each block
  };
  /// Elements begin .. begin + n - 1 of an owner.
  struct Piece {
    size_t owner = 0;
    int64_t begin = 0, n = 0;
    std::span<const at::Tensor> state;  ///< one flat tensor per kind, to be updated in place
    bool fresh = false;                 ///< the owner has no state yet: the tensors hold zeros
  };

  /// Reserves the space and allocates the buffers. With `meta` (a rehearsal) there is no file, and buffers are meta tensors.
  /// ConfigError as ScratchFile, and for buffers that are too few or too small.
  StateFile(std::vector<Owner> owners, StateFileOptions options, bool meta = false, const memory::FileCalls& calls = memory::FileCalls::system());
  ~StateFile();

  /// Calls `update` for each piece of the owners that are `active`, in order; what it leaves in the tensors goes to the file, also
  /// after the call returns. ConfigError when the disk fails; from then on every call says so.
  void for_each(const std::vector<bool>& active, const std::function<void(const Piece&)>& update);

  bool has_state(size_t owner) const { return present_[owner]; }
  /// The owner's tensors over read-only pages of the file, verified; valid until the next for_each() or store().
  std::vector<at::Tensor> pages(size_t owner);
  void store(size_t owner, const std::vector<at::Tensor>& tensors);

  int64_t file_bytes() const { return file_bytes_; }
  /// Of all buffers together.
  int64_t buffer_bytes() const;
  memory::ScratchUse use() const;
  /// Of the disk, measured when the file was made.
  memory::ScratchRates rates() const { return rates_; }

 private:
  struct Part;    // of an owner, in a buffer
  struct Buffer;  // memory on its way
  struct Batch;   // what fills a buffer

  void plan();
  int64_t bytes_of(const Owner& owner, int64_t elements) const;
  std::vector<memory::ScratchFile::Extent> extents_of(const Part& part, Buffer& buffer) const;
  std::vector<at::Tensor> tensors_of(const Part& part, const Buffer& buffer) const;
  void begin_read(const std::vector<Part>& parts, Buffer& buffer);
  void settle();

  std::vector<Owner> owners_;
  StateFileOptions options_;
  bool meta_;
  std::vector<std::vector<int64_t>> offsets_;  // of each owner's tensors in the file
  std::vector<bool> present_;
  std::vector<Batch> batches_;
  int64_t file_bytes_ = 0, fullest_ = 0;  // fullest_: what the largest batch takes of a buffer
  std::vector<Buffer> buffers_;
  std::unique_ptr<memory::ScratchFile> file_;  // ends first: its threads use the buffers
  memory::ScratchRates rates_;
  std::string broken_;
};

}  // namespace weft::optim
