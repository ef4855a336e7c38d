// weft::describe: what a module of one's own needs, counted in one forward and backward, for weft plan --spec and weft estimate --spec.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "weft/plan/program.h"

namespace torch::nn {
class Module;
}

namespace weft {

using plan::ProgramSpec;

/// One forward and backward of `module`, counted: parameters, FLOPs (products, convolutions, attention), bytes that backward needs, peak,
/// results. `forward` returns what is differentiated: its sum is. `samples`: of the batch that forward works on.
///
/// A module on the meta device (built under weft::deferred, or with meta options; inputs on meta as well) computes nothing and needs no
/// memory, where libtorch has every operation there (convolutions and relu it has not); one on the CPU computes once. Gradients are left as they were; buffers such as running means move on by one step.
/// Not counted: FLOPs inside fused recurrent kernels. ConfigError for a module without trainable parameters, on another device, that
/// cannot be counted on meta, or whose result does not depend on its parameters.
ProgramSpec describe(torch::nn::Module& module, int64_t samples, const std::function<at::Tensor()>& forward, const std::string& name = "program");

/// weft::describe(net, x): `net` a module holder, `inputs` what its forward takes; dim 0 of the first are the samples.
template <class Holder, class... Inputs>
ProgramSpec describe(Holder& net, const at::Tensor& first, const Inputs&... inputs) {
  return describe(*net, first.size(0), [&] { return at::Tensor(net->forward(first, inputs...)); }, net->name());
}

/// As --spec reads it. ConfigError when the file cannot be written.
void write_spec(const ProgramSpec& spec, const std::string& path);

}  // namespace weft
