// AdamW with moments in 8 bits: 2.03 bytes of moments per parameter instead of 8.
#pragma once

#include <torch/optim/adamw.h>

#include "weft/optim/elementwise.h"

namespace weft::optim {

/// AdamW whose moments are kept as 8-bit codes of a dynamic tree, with one scale per block of 256 elements (Dettmers et al. 2022,
/// "8-bit Optimizers via Block-wise Quantization", sections 2.1 and 2.2). Moments are unpacked, updated and packed in one pass; the
/// weight sees them before they are packed. Parameters below 4096 elements keep fp32 moments (bitsandbytes' min_8bit_size). A second
/// moment above zero is never stored as zero, which would let the next step divide by eps alone.
///
/// Blocks are counted from the beginning of the whole parameter, so that numbers do not depend on the ranks; shards have to be cut
/// between blocks: DataParallelOptions::granules = {{"*", 256}}, and so have parts of tensor-parallel ranks. ConfigError, by name, for what is not; and
/// for amsgrad. Construction is collective over tensor-parallel ranks.
class Adam8bit : public ElementwiseOptimizer {
 public:
  explicit Adam8bit(const std::vector<OptimizerParamGroup>& groups, torch::optim::AdamWOptions defaults = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  std::vector<StateSpec> own_states(const at::Tensor& parameter, const OptimizerOptions& options) const override;
  int64_t granule(const at::Tensor& parameter) const override;
  void update(const Stretch& stretch, const OptimizerOptions& options) const override;
};

/// Below so many elements (of the whole parameter) moments stay in fp32.
inline constexpr int64_t kLeastQuantised = 4096;

}  // namespace weft::optim
