// Dropout whose mask is a function of (seed, layer name, step, global element index): the same in every layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::nn {

/// Where a forward pass's tokens [B, T] lie in the run. Row b is sample first_sample + b * sample_stride of the step's
/// global batch; column t is position first_position + t of its sequence.
struct TokenPlace {
  int64_t step = 0;  ///< optimizer update that this pass belongs to
  int64_t first_sample = 0;
  int64_t sample_stride = 1;
  int64_t first_position = 0;
};

/// Zeroes elements with a probability and scales the rest by 1 / (1 - probability). Keeps no mask for backward.
class Dropout {
 public:
  /// context: longest sequence of the model (it numbers the elements, so it must not depend on the layout).
  Dropout(double probability, uint64_t seed, std::string_view name, int64_t context);
  /// x [B, T, D]. Identity for probability 0.
  at::Tensor operator()(const at::Tensor& x, const TokenPlace& place) const;

 private:
  double probability_;
  uint64_t seed_;
  std::string name_;
  int64_t context_;
};

}  // namespace weft::nn
