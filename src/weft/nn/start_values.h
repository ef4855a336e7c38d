// Parameters that have a shape but no memory yet (meta tensors), and where their values will come from.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace weft::nn {

/// The values of one tensor as a function of the element's index, so that a rank can make its own part alone.
class StartValues {
 public:
  virtual ~StartValues() = default;
  /// Writes elements begin .. begin + part.numel() - 1 (row-major in the whole tensor) into `part` [n] (contiguous, CPU).
  virtual void write(int64_t begin, at::Tensor part) const = 0;
  /// The same text on ranks that write the same values.
  virtual std::string describe() const = 0;
};

/// Attaches them to a meta tensor.
void set_start_values(const at::Tensor& meta, std::shared_ptr<const StartValues> values);
/// Null when `tensor` has memory, or nobody said its values.
std::shared_ptr<const StartValues> start_values(const at::Tensor& tensor);

/// What is wrong with a meta tensor that has none.
inline constexpr char kNoValues[] =
    "is on the meta device, and nothing says its values. Build the module under weft::deferred, and change its dtype (to()) inside";

/// `home`'s memory, dtype and strides become those of `tensor`, whose identity stays (as Tensor::set_data, which refuses to take
/// a meta tensor to memory). Before the first backward.
void move_to_memory(const at::Tensor& tensor, const at::Tensor& home);

/// Gives a meta tensor that has start values memory of its own and all its values; others are left as they are.
void materialise(const at::Tensor& tensor);

}  // namespace weft::nn
