// Batches for next-token prediction, as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "weft/data/sampler.h"
#include "weft/data/token_file.h"

namespace weft::data {

/// A micro-batch. Every target counts: `tokens` = samples * seq.
struct Batch {
  at::Tensor inputs;   ///< [samples, seq] int64
  at::Tensor targets;  ///< [samples, seq] int64, inputs shifted by one token
  int64_t tokens = 0;
  int64_t first_sample = 0;  ///< place of the first sample in the global batch
};

/// Samples of one token file (windows of seq + 1 tokens, see sample_count).
class TokenSamples {
 public:
  /// ConfigError when the file holds less than one sample.
  TokenSamples(TokenFile file, int64_t seq);

  int64_t size() const { return size_; }
  int64_t seq() const { return seq_; }
  const TokenFile& file() const { return file_; }

  Batch batch(const std::vector<int64_t>& samples) const;

 private:
  TokenFile file_;
  int64_t seq_, size_;
};

/// The part of each global batch that one data-parallel coordinate trains on. Samples belong to places of the global
/// batch, places to coordinates in contiguous shares: the union over coordinates does not depend on their number.
class TrainBatches {
 public:
  /// micro_batch: most samples of one forward pass; the last of a step may be smaller.
  TrainBatches(TokenSamples samples, Sampler sampler, int64_t global_batch, int64_t micro_batch, int64_t dp_rank,
               int64_t dp_size);

  /// Forward passes per step on this coordinate.
  int64_t accumulation() const;
  /// Micro-batch `micro` of the global batch that starts at stream position `consumed`.
  Batch at(int64_t consumed, int64_t micro) const;
  /// Targets of one global batch over all coordinates.
  int64_t tokens_per_step() const { return global_batch_ * samples_.seq(); }
  int64_t epoch(int64_t consumed) const { return sampler_.epoch(consumed); }

 private:
  TokenSamples samples_;
  Sampler sampler_;
  int64_t global_batch_, micro_batch_;
  Share share_;
};

}  // namespace weft::data
