// Optimizers that look at more than single elements, and parameters that tensor-parallel ranks share out.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace weft::optim {

/// ConfigError when one of the tensors belongs to a parameter of which tensor-parallel ranks hold parts: `optimizer` would take each part
/// for a whole (`why`), and its numbers would depend on the layout.
void refuse_tensor_parts(const std::vector<torch::optim::OptimizerParamGroup>& groups, const std::string& optimizer, const std::string& why);

}  // namespace weft::optim
