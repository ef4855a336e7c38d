#include "weft/parallel/pipeline/stage.h"

#include <fmt/format.h>

#include "weft/core/error.h"

namespace weft {
namespace parallel {

void refuse_number_of_inputs(const std::string& stage, size_t wanted, size_t given) {
  throw ConfigError(fmt::format("forward of {} takes {} tensors, and the stage before hands over {}", stage.empty() ? "a stage" : stage, wanted, given));
}

}  // namespace parallel

namespace {

at::Tensor call_first(torch::nn::AnyModule& module, const std::string& name, const std::vector<at::Tensor>& x) {
  switch (x.size()) {
    case 1: return module.forward(x[0]);
    case 2: return module.forward(x[0], x[1]);
    case 3: return module.forward(x[0], x[1], x[2]);
    default: parallel::refuse_number_of_inputs(name, 1, x.size());
  }
}

}  // namespace

Stage stage_of(std::vector<torch::nn::AnyModule> list, std::shared_ptr<torch::nn::Module> module, const std::string& name) {
  const auto modules = std::make_shared<std::vector<torch::nn::AnyModule>>(std::move(list));
  return {.name = name, .module = std::move(module), .forward = [modules, name](std::vector<at::Tensor> inputs, const SideInputs&) {
            for (torch::nn::AnyModule& any : *modules) inputs = {call_first(any, name, inputs)};
            return inputs;
          }};
}

Stage stage_of(const torch::nn::AnyModule& module, const std::string& name) { return stage_of(std::vector{module}, module.ptr(), name); }

Stage stage_of(const torch::nn::Sequential& sequential, const std::string& name) {
  return stage_of(std::vector<torch::nn::AnyModule>(sequential->begin(), sequential->end()), sequential.ptr(), name);
}

std::string Stages::counted_elsewhere(int rank) const {
  std::string names;
  for (const TiedParameter& tie : tied) {
    const int first = owner[static_cast<size_t>(tie.of_stage.begin()->first)];
    if (first == rank) continue;
    for (const auto& [stage, parameter] : tie.of_stage) {
      if (owner[static_cast<size_t>(stage)] == rank) names += (names.empty() ? "" : "|") + parameter;
    }
  }
  return names;
}

}  // namespace weft
