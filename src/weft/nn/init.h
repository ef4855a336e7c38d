// Initial weights as a pure function of (seed, parameter name, global element index).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "weft/model/spec.h"
#include "weft/nn/start_values.h"

namespace weft::nn {

/// Writes elements begin .. begin + slice.numel() - 1 (row-major in the global tensor) of parameter `name` into `slice`
/// (any shape, contiguous, CPU, floating point). Draws are fp64 Philox normals; fp32 rounds them and bf16 rounds
/// the fp32 value, so a bf16 model is a cast fp32 one. Any cut of a parameter over any number of ranks gives the same numbers.
void init_parameter(std::string_view name, const model::InitRule& rule, uint64_t seed, int64_t begin, at::Tensor slice);

/// The same rule as start values of a meta tensor.
std::shared_ptr<const StartValues> rule_values(std::string name, const model::InitRule& rule, uint64_t seed);

}  // namespace weft::nn
