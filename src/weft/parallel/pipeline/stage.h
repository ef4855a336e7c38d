// Stage: what a pipeline runs on one stretch of the model. A value; every kind of module becomes one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/nn/unit.h"

namespace weft {

/// Tensors that every stage sees beside the activations, by name: masks, positions, ids. A micro-batch's rows of them.
using SideInputs = std::map<std::string, at::Tensor>;

struct Stage {
  std::string name;                           ///< for messages; "stage 2" where it is empty
  std::shared_ptr<torch::nn::Module> module;  ///< holds the parameters that forward uses; may be null
  /// Outputs of the stage before (of stage 0: the inputs) -> inputs of the next (of the last: what the loss gets). The same number, shapes and
  /// dtypes in every micro-batch of a step but for dim 0. An output of a floating dtype that requires a gradient gets one.
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>, const SideInputs&)> forward;
};

namespace parallel {

template <class T>
inline constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, at::Tensor>;
template <class T>
inline constexpr bool is_side = std::is_same_v<std::decay_t<T>, SideInputs>;

[[noreturn]] void refuse_number_of_inputs(const std::string& stage, size_t wanted, size_t given);

template <class M, class R, class... A>
std::vector<at::Tensor> call_forward(M& module, R (M::*)(A...), const std::string& name, std::vector<at::Tensor>& inputs, const SideInputs& side) {
  static_assert(((is_tensor<A> || is_side<A> || std::is_same_v<std::decay_t<A>, std::vector<at::Tensor>>) && ...),
                "a stage's forward takes tensors, or a std::vector of them, and may take const SideInputs&");
  constexpr bool takes_list = (std::is_same_v<std::decay_t<A>, std::vector<at::Tensor>> || ...);
  constexpr size_t wanted = (static_cast<size_t>(is_tensor<A>) + ... + 0);
  if (!takes_list && inputs.size() != wanted) refuse_number_of_inputs(name, wanted, inputs.size());
  size_t next = 0;
  const auto argument = [&]<class T>(std::type_identity<T>) -> decltype(auto) {
    if constexpr (is_side<T>) {
      return static_cast<const SideInputs&>(side);
    } else if constexpr (is_tensor<T>) {
      return static_cast<at::Tensor&>(inputs[next++]);
    } else {
      return static_cast<std::vector<at::Tensor>&>(inputs);
    }
  };
  std::tuple<decltype(argument(std::type_identity<A>{}))...> arguments{argument(std::type_identity<A>{})...};  // braces: left to right
  std::vector<at::Tensor> outputs;
  std::apply([&](auto&... argument_value) { nn::collect_tensors(module.forward(static_cast<A>(argument_value)...), outputs); }, arguments);
  return outputs;
}
template <class M, class R, class... A>
std::vector<at::Tensor> call_forward(M& module, R (M::*)(A...) const, const std::string& name, std::vector<at::Tensor>& inputs, const SideInputs& side) {
  return call_forward<M, R, A...>(module, static_cast<R (M::*)(A...)>(nullptr), name, inputs, side);
}

}  // namespace parallel

/// Of a module whose forward takes tensors (or one std::vector of them), and maybe `const SideInputs&`; and returns a tensor, or several in a
/// tuple or vector. Without the side inputs in its signature it does not see them.
template <class M>
Stage stage_of(const std::shared_ptr<M>& module, const std::string& name = "") {
  return {.name = name, .module = module, .forward = [module, name](std::vector<at::Tensor> inputs, const SideInputs& side) {
            return parallel::call_forward(*module, &M::forward, name, inputs, side);
          }};
}
template <class Contained>
Stage stage_of(const torch::nn::ModuleHolder<Contained>& holder, const std::string& name = "") {
  return stage_of(holder.ptr(), name);
}
/// Modules of one tensor, one after the other; the first may take up to three.
Stage stage_of(const torch::nn::Sequential& sequential, const std::string& name = "");
Stage stage_of(const torch::nn::AnyModule& module, const std::string& name = "");
/// The modules of `list`, one after the other; `module` holds their parameters.
Stage stage_of(std::vector<torch::nn::AnyModule> list, std::shared_ptr<torch::nn::Module> module, const std::string& name = "");

/// A parameter that several stages hold (a tied embedding and head): one logical parameter. Its name in Stages::module, by stage. A rank with several
/// of these stages has one tensor for them.
struct TiedParameter {
  std::map<int, std::string> of_stage;
};

/// All that a rank knows of a cut model. `local` differs between ranks, the rest is equal.
struct Stages {
  std::map<int, Stage> local;       ///< by number, 0 next to the input
  std::vector<int> owner;           ///< owner[stage] = pipeline rank
  std::vector<TiedParameter> tied;
  /// Holds the local stages' modules, with the names that they have in the whole model: for DataParallel and optimizers.
  std::shared_ptr<torch::nn::Module> module;

  /// For DataParallelOptions: copies on `rank` that a rank of an earlier stage counts.
  std::string counted_elsewhere(int rank) const;
};

}  // namespace weft
