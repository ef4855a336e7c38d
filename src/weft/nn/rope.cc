#include "weft/nn/rope.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "weft/core/error.h"
#include "weft/memory/account.h"
#include "weft/nn/fused.h"

namespace weft::nn {
namespace {

/// Llama 3.1's rule: long wavelengths are slowed by `factor`, short ones kept, those between blended.
at::Tensor llama3_frequencies(const at::Tensor& frequency, const model::RopeSpec& spec) {
  const at::Tensor turns = frequency * (static_cast<double>(spec.original_context) / (2 * std::numbers::pi));
  const at::Tensor keep =
      ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0.0, 1.0);
  return frequency * keep + frequency / spec.factor * (1.0 - keep);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t rotated = cos.size(-1);
  const bool whole = rotated == x.size(-1);
  const at::Tensor part = whole ? x : x.narrow(-1, 0, rotated);
  const std::vector<at::Tensor> halves = part.chunk(2, -1);
  const at::Tensor turned = (part * cos + at::cat({-halves[1], halves[0]}, -1) * sin).to(x.scalar_type());
  return whole ? turned : at::cat({turned, x.narrow(-1, rotated, x.size(-1) - rotated)}, -1);
}

}  // namespace

int64_t rotated_channels(const model::RopeSpec& spec, int64_t head_dim) {
  const auto rotated = static_cast<int64_t>(spec.fraction * static_cast<double>(head_dim));
  if (rotated < 2 || rotated % 2 != 0 || rotated > head_dim)
    throw ConfigError(fmt::format("rope.fraction = {} of head_dim = {} rotates {} channels; it must be an even number from 2 "
                                  "to head_dim. Change rope.fraction or head_dim.", spec.fraction, head_dim, rotated));
  return rotated;
}

RopeTable rope_table(const model::RopeSpec& spec, int64_t head_dim, int64_t positions, const at::TensorOptions& options) {
  // Lives as long as the model, wherever it is made: under InferenceMode, too, it is for training later.
  const memory::Scope scope(memory::Category::other);
  const c10::InferenceMode ordinary(false);
  const int64_t rotated = rotated_channels(spec, head_dim);
  const auto type = options.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  const at::TensorOptions computed = options.dtype(type).requires_grad(false);
  const at::Tensor exponent = -at::arange(0, rotated, 2, computed) / static_cast<double>(rotated);
  at::Tensor frequency = at::pow(spec.theta, exponent);
  if (spec.scaling == "linear") frequency = frequency / spec.factor;
  else if (spec.scaling == "llama3") frequency = llama3_frequencies(frequency, spec);
  else if (spec.scaling != "none")
    throw ConfigError(fmt::format("rope.scaling = \"{}\" is not supported by the runtime; use none, linear or llama3.", spec.scaling));
  const at::Tensor angles = at::outer(at::arange(positions, computed), frequency);  // [positions, rotated / 2]
  const at::Tensor cos = angles.cos(), sin = angles.sin();
  return {at::cat({cos, cos}, 1), at::cat({sin, sin}, 1)};
}

std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const RopeTable& table, Kernels kernels) {
  if (kernels == Kernels::fused && fused::serves({q, k})) return fused::rope(q, k, table.cos, table.sin);
  const at::Tensor cos = table.cos.unsqueeze(1), sin = table.sin.unsqueeze(1);  // [T, 1, rotated]
  return {rotate(q, cos, sin), rotate(k, cos, sin)};
}

}  // namespace weft::nn
