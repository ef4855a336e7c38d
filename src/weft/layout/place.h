// Where parameters lie in flat buffers, and which of them are reduced together. Runtime, planner and checkpoints call
// these same functions, so that what is counted is what is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::layout {

/// Every parameter starts at a multiple of this many elements: 64 bytes for 16-bit types, more for wider ones. Kernels
/// then see the alignment that a tensor of its own would have, and give the same bits.
inline constexpr int64_t kFlatAlignment = 32;

/// Offsets of tensors in a flat buffer, in elements.
struct FlatPlan {
  std::vector<int64_t> offsets;  ///< one per tensor, in the order given
  int64_t numel = 0;             ///< length of the buffer, padding included
};

/// Packs tensors of `numels` elements one after the other, each start aligned to kFlatAlignment, the total to
/// kFlatAlignment * parts, so that the buffer cuts into `parts` equal aligned shards. With a granule above 1 the multiples are of
/// both, so that every cut falls on a multiple of `granule` elements, counted from the beginning of the tensor that it cuts.
FlatPlan place(const std::vector<int64_t>& numels, int64_t parts = 1, int64_t granule = 1);

/// A parameter as bucketing sees it. Buckets never mix keys (storage, gradient dtype, ...).
struct BucketItem {
  int64_t bytes = 0;
  std::string key;
};

struct BucketLimits {
  int64_t bytes = 25 << 20;      ///< as PyTorch's DDP: large enough for bandwidth, small enough to overlap
  int64_t last_bytes = 1 << 20;  ///< the bucket that is ready last is never hidden behind backward, so it is small
};

/// Groups items (given in parameter-table order) into buckets, returned in the order in which backward completes them:
/// last parameters first. A bucket exceeds its limit only when it holds a single item. Depends on the arguments alone,
/// hence equal on all ranks.
std::vector<std::vector<int64_t>> make_buckets(const std::vector<BucketItem>& items, const BucketLimits& limits = {});

/// Buffers of one size.
struct BufferClass {
  int64_t bytes = 0;
  int count = 0;
};

/// The buffers for full gradients of groups with so many bytes each, which exist only until they are reduced: of `ordered`, whose
/// gradients come in this order or its reverse, and of `others`, whose come at any time. Up to three groups are in flight: the peers'
/// of one are read while the next fills its own, and a third is ready early. All buffers are as large as the largest group; or,
/// where that holds less, there are some for small groups (blocks) and some for large ones: embedding and head, which are far
/// apart, share one. Large ones first.
std::vector<BufferClass> gradient_buffers(const std::vector<int64_t>& ordered, const std::vector<int64_t>& others = {});

}  // namespace weft::layout
