// Lower precision for modules that are not ours.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace weft::optim {

/// While it lives, libtorch computes matrix products, convolutions and the like of this thread in `dtype` and what needs
/// range (losses, norms, softmax) in fp32, whatever module asks; weights and their gradients stay in fp32. Put the forward
/// and the loss inside, backward outside. With fp16 use a LossScaler as well.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype = at::kBFloat16, at::DeviceType device = at::kCPU);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  at::ScalarType outer_dtype_;
  bool outer_enabled_;
};

}  // namespace weft::optim
