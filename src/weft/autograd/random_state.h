// The state of a CPU random generator as a value.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <optional>

namespace weft::autograd {

/// Of the default CPU generator.
class RandomState {
 public:
  /// As it is now.
  static RandomState now();
  void restore() const;
  bool operator==(const RandomState& other) const;

 private:
  at::mt19937 engine_;
  std::optional<float> next_float_;  // normal numbers come in pairs
  std::optional<double> next_double_;
};

}  // namespace weft::autograd
