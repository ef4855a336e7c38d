#include "weft/optim/state_file.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "weft/core/error.h"
#include "weft/core/units.h"
#include "weft/memory/account.h"

namespace weft::optim {
namespace {

/// Tensors begin at multiples of it, in buffers and in the file: a cache line.
constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t entries(const StateFile::Kind& kind, int64_t elements) { return (elements + kind.block - 1) / kind.block; }

int64_t entry_bytes(const StateFile::Kind& kind) { return static_cast<int64_t>(c10::elementSize(kind.dtype)); }

}  // namespace

struct StateFile::Part {
  size_t owner = 0;
  int64_t begin = 0, n = 0;
  int64_t at = 0;  // byte in the buffer
};

struct StateFile::Batch {
  std::vector<Part> parts;
};

struct StateFile::Buffer {
  at::Tensor memory;  // [buffer_bytes] uint8
  memory::ScratchFile::Transfer read, written;
};

StateFile::StateFile(std::vector<Owner> owners, StateFileOptions options, bool meta, const memory::FileCalls& calls)
    : owners_(std::move(owners)), options_(std::move(options)), meta_(meta), present_(owners_.size(), false) {
  if (options_.buffers < 3) {
    throw ConfigError(fmt::format("offload needs at least 3 buffers (one is read, one updated, one written); it has {}", options_.buffers));
  }
  for (const Owner& owner : owners_) {
    std::vector<int64_t>& offsets = offsets_.emplace_back();
    for (const Kind& kind : owner.tensors) {
      offsets.push_back(file_bytes_);
      file_bytes_ += aligned(entries(kind, owner.numel) * entry_bytes(kind));
    }
  }
  plan();
  if (batches_.empty()) return;
  const memory::Scope scope(memory::Category::optimizer);
  const auto place = at::TensorOptions(at::kByte).device(meta_ ? at::kMeta : at::kCPU);
  const auto count = std::min(options_.buffers, static_cast<int64_t>(std::ssize(batches_)));
  for (int64_t i = 0; i < count; ++i) buffers_.push_back({at::empty({fullest_}, place), {}, {}});
  if (meta_) return;
  file_ = std::make_unique<memory::ScratchFile>(options_.dir, file_bytes_, options_.what, calls);
  constexpr int64_t kEnoughToMeasure = int64_t{32} << 20;
  rates_ = file_->measure(buffers_.front().memory.zero_().mutable_data_ptr(), fullest_, std::min(file_bytes_, kEnoughToMeasure));
}

StateFile::~StateFile() = default;

int64_t StateFile::bytes_of(const Owner& owner, int64_t elements) const {
  int64_t bytes = 0;
  for (const Kind& kind : owner.tensors) bytes += aligned(entries(kind, elements) * entry_bytes(kind));
  return bytes;
}

/// Fills one buffer after the other, with parts of one owner or several.
void StateFile::plan() {
  int64_t used = options_.buffer_bytes;  // of the last batch: full
  for (size_t o = 0; o < owners_.size(); ++o) {
    const Owner& owner = owners_[o];
    if (owner.tensors.empty() || owner.numel == 0) continue;
    const int64_t per_granule = bytes_of(owner, std::min(owner.granule, owner.numel));
    if (per_granule > options_.buffer_bytes) {
      throw ConfigError(fmt::format("an offload buffer of {} is too small: {} elements of a parameter are updated together and have {} "
                                    "of state. Enlarge the buffers (offload.buffer_mb)",
                                    bytes_text(static_cast<double>(options_.buffer_bytes)), std::min(owner.granule, owner.numel), bytes_text(static_cast<double>(per_granule))));
    }
    for (int64_t begin = 0; begin < owner.numel;) {
      // A lower bound of what fits, as alignment is paid once and not per granule.
      int64_t n = (options_.buffer_bytes - used) / per_granule * owner.granule;
      while (n < owner.numel - begin && used + bytes_of(owner, n + owner.granule) <= options_.buffer_bytes) n += owner.granule;
      if (n == 0) {
        batches_.emplace_back();
        used = 0;
        continue;
      }
      n = std::min(n, owner.numel - begin);
      batches_.back().parts.push_back({.owner = o, .begin = begin, .n = n, .at = used});
      used += bytes_of(owner, n);
      fullest_ = std::max(fullest_, used);
      begin += n;
    }
  }
}

std::vector<memory::ScratchFile::Extent> StateFile::extents_of(const Part& part, Buffer& buffer) const {
  const Owner& owner = owners_[part.owner];
  std::vector<memory::ScratchFile::Extent> extents;
  int64_t at = part.at;
  for (size_t t = 0; t < owner.tensors.size(); ++t) {
    const Kind& kind = owner.tensors[t];
    const int64_t bytes = entries(kind, part.n) * entry_bytes(kind);
    extents.push_back({.offset = offsets_[part.owner][t] + part.begin / kind.block * entry_bytes(kind),
                       .bytes = bytes,
                       .data = buffer.memory.mutable_data_ptr<uint8_t>() + at});
    at += aligned(bytes);
  }
  return extents;
}

std::vector<at::Tensor> StateFile::tensors_of(const Part& part, const Buffer& buffer) const {
  std::vector<at::Tensor> tensors;
  int64_t at = part.at;
  for (const Kind& kind : owners_[part.owner].tensors) {
    const int64_t bytes = entries(kind, part.n) * entry_bytes(kind);
    tensors.push_back(buffer.memory.narrow(0, at, bytes).view(kind.dtype));
    at += aligned(bytes);
  }
  return tensors;
}

void StateFile::begin_read(const std::vector<Part>& parts, Buffer& buffer) {
  file_->wait(buffer.written);
  std::vector<memory::ScratchFile::Extent> extents;
  for (const Part& part : parts) {
    if (!present_[part.owner]) continue;
    for (const auto& extent : extents_of(part, buffer)) extents.push_back(extent);
  }
  buffer.read = file_->read(std::move(extents));
}

/// Waits for all that was begun.
void StateFile::settle() {
  for (Buffer& buffer : buffers_) {
    if (file_) file_->wait(buffer.written);
  }
}

void StateFile::for_each(const std::vector<bool>& active, const std::function<void(const Piece&)>& update) {
  if (!broken_.empty()) throw ConfigError(broken_);
  std::vector<std::vector<Part>> work;
  for (const Batch& batch : batches_) {
    std::vector<Part> parts;
    std::copy_if(batch.parts.begin(), batch.parts.end(), std::back_inserter(parts), [&](const Part& part) { return active[part.owner]; });
    if (!parts.empty()) work.push_back(std::move(parts));
  }
  try {
    settle();  // what the last call wrote may be read from another buffer
    // Two buffers stay behind the reads: the one that is updated, and the one before it, which is written.
    const size_t count = buffers_.size(), ahead = count < 2 ? 0 : count - 2;
    size_t begun = 0;
    for (size_t k = 0; k < work.size(); ++k) {
      Buffer& buffer = buffers_[k % count];
      for (; file_ && begun < work.size() && begun <= k + ahead; ++begun) begin_read(work[begun], buffers_[begun % count]);
      if (file_) file_->wait(buffer.read);
      std::vector<memory::ScratchFile::Extent> extents;
      for (const Part& part : work[k]) {
        const std::vector<at::Tensor> tensors = tensors_of(part, buffer);
        const bool fresh = !present_[part.owner];
        for (const at::Tensor& t : tensors) {
          if (fresh) t.zero_();
        }
        update({.owner = part.owner, .begin = part.begin, .n = part.n, .state = tensors, .fresh = fresh});
        if (!file_) continue;
        for (const auto& extent : extents_of(part, buffer)) extents.push_back(extent);
      }
      if (file_) buffer.written = file_->write(std::move(extents));
    }
  } catch (const std::exception& error) {
    broken_ = fmt::format("{} was lost in an earlier step: {}", options_.what, error.what());
    throw;
  }
  for (size_t o = 0; o < owners_.size(); ++o) present_[o] = present_[o] || (active[o] && !owners_[o].tensors.empty());
}

std::vector<at::Tensor> StateFile::pages(size_t owner) {
  if (!broken_.empty()) throw ConfigError(broken_);
  settle();
  std::vector<at::Tensor> tensors;
  if (!present_[owner]) return tensors;
  if (owners_[owner].numel == 0) {
    for (const Kind& kind : owners_[owner].tensors) tensors.push_back(at::empty({0}, at::TensorOptions(kind.dtype)));
    return tensors;
  }
  if (!file_) return tensors;
  const std::shared_ptr<const std::byte> pages = file_->map();
  for (const Batch& batch : batches_) {
    for (const Part& part : batch.parts) {
      if (part.owner != owner) continue;
      for (size_t t = 0; t < owners_[owner].tensors.size(); ++t) {
        const Kind& kind = owners_[owner].tensors[t];
        const int64_t offset = offsets_[owner][t] + part.begin / kind.block * entry_bytes(kind);
        file_->check(offset, entries(kind, part.n) * entry_bytes(kind), pages.get() + offset);
      }
    }
  }
  for (size_t t = 0; t < owners_[owner].tensors.size(); ++t) {
    const Kind& kind = owners_[owner].tensors[t];
    void* data = const_cast<std::byte*>(pages.get() + offsets_[owner][t]);
    tensors.push_back(at::from_blob(data, {entries(kind, owners_[owner].numel)}, [pages](void*) {}, at::TensorOptions(kind.dtype)));
  }
  return tensors;
}

void StateFile::store(size_t owner, const std::vector<at::Tensor>& tensors) {
  settle();
  present_[owner] = true;
  if (!file_) return;
  for (const Batch& batch : batches_) {
    for (const Part& part : batch.parts) {
      if (part.owner != owner) continue;
      Buffer& buffer = buffers_.front();
      const std::vector<at::Tensor> targets = tensors_of(part, buffer);
      for (size_t t = 0; t < targets.size(); ++t) {
        targets[t].copy_(tensors[t].view(-1).narrow(0, part.begin / owners_[owner].tensors[t].block, targets[t].numel()));
      }
      buffer.written = file_->write(extents_of(part, buffer));
      file_->wait(buffer.written);
    }
  }
}

int64_t StateFile::buffer_bytes() const { return fullest_ * std::ssize(buffers_); }

memory::ScratchUse StateFile::use() const { return file_ ? file_->use() : memory::ScratchUse{}; }

}  // namespace weft::optim
