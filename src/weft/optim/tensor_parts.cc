#include "weft/optim/tensor_parts.h"

#include <fmt/format.h>

#include "weft/core/error.h"
#include "weft/nn/placement.h"

namespace weft::optim {

void refuse_tensor_parts(const std::vector<torch::optim::OptimizerParamGroup>& groups, const std::string& optimizer, const std::string& why) {
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) {
      const auto placement = nn::placement_of(p);
      if (!placement || placement->dim < 0 || placement->comm.size() == 1) continue;
      throw ConfigError(fmt::format("weft::optim::{} {}, and {} tensor-parallel ranks hold parts of a parameter of shape {}: the numbers would depend on "
                                    "the layout. Use an optimizer that treats elements alike (AdamW, SGD, Lion), or no tensor parallelism",
                                    optimizer, why, placement->comm.size(), c10::str(at::IntArrayRef(placement->shape))));
    }
  }
}

}  // namespace weft::optim
