#include "weft/parallel/tensor_ranks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "weft/core/error.h"
#include "weft/nn/placement.h"

namespace weft::parallel {

TensorRanks tensor_ranks_of(const std::vector<NamedTensor>& parameters) {
  TensorRanks result;
  const NamedTensor* first = nullptr;
  for (const NamedTensor& p : parameters) {
    const auto placement = nn::placement_of(p.tensor);
    if (!placement || placement->comm.size() == 1) continue;
    if (first == nullptr) {
      first = &p;
      result.comm = placement->comm;
    } else if (placement->comm.state() != result.comm.state()) {
      throw ConfigError(fmt::format("parameters '{}' and '{}' are shared out over different tensor-parallel groups ('{}' of {} ranks, '{}' of {}). "
                                    "Build the whole module over one", first->name, p.name, result.comm.name(), result.comm.size(),
                                    placement->comm.name(), placement->comm.size()));
    }
  }
  for (const NamedTensor& p : parameters) {
    const auto placement = nn::placement_of(p.tensor);
    result.counted.push_back(placement ? placement->counts() : result.comm.rank() == 0);
  }
  return result;
}

bool agree_on_step(bool good, StepFault& fault, const Comm& comm) {
  if (comm.size() == 1) return good;
  const at::Tensor failed = at::full({1}, good ? 0.0F : 1.0F, at::kFloat);
  comm.all_reduce(failed, ReduceOp::max).wait();
  if (failed.item<float>() == 0.0F) return true;
  const bool threw = fault.kind == StepFault::Kind::threw;
  const std::vector<std::string> said = comm.all_gather_text(!fault ? "" : threw ? "its backward threw. " + fault.text : fault.text);
  for (int rank = 0; rank < comm.size() && !fault; ++rank) {
    const std::string& text = said[static_cast<size_t>(rank)];
    if (!text.empty()) fault = {StepFault::Kind::rule, fmt::format("tensor-parallel rank {}: {}", comm.world_rank(rank), text)};
  }
  return false;
}

}  // namespace weft::parallel
