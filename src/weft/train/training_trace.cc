#include "weft/train/training_trace.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>

#include "weft/nn/placement.h"
#include "weft/parallel/whole.h"
#include "weft/train/stages.h"
#include "weft/train/weights.h"

namespace weft::train {
namespace {

/// Of parallel/gradient_norm.cc.
constexpr double kClipEpsilon = 1e-6;

/// Each rank has seen the groups that it is in, and the parameters of its stages.
std::vector<CopyDifference> largest_of(const std::vector<CopyDifference>& mine, const Comm& world) {
  std::string text;
  for (const CopyDifference& c : mine) text += fmt::format("{} {} {}\n", c.name, c.axis, c.difference);
  std::map<std::pair<std::string, std::string>, size_t> places;
  std::vector<CopyDifference> result;
  for (const std::string& said : world.all_gather_text(text)) {
    std::istringstream words(said);
    for (std::string name, axis, number; words >> name >> axis >> number;) {
      const auto [place, fresh] = places.try_emplace({name, axis}, result.size());
      if (fresh) result.push_back({name, axis == "pipeline" ? "pipeline" : axis == "tensor-parallel" ? "tensor-parallel" : "data-parallel", 0});
      double& most = result[place->second].difference;
      most = std::max(most, std::strtod(number.c_str(), nullptr));
    }
  }
  return result;
}

}  // namespace

TraceRecorder::TraceRecorder(const torch::nn::Module& module, DataParallel& dp, Comm world, bool keep)
    : module_(module), dp_(dp), world_(std::move(world)), keep_(keep) {
  trace_.starts = weights();
  trace_.start_copies = copies();
}

std::vector<NamedTensor> TraceRecorder::weights() {
  const auto full = dp_.gather_full();
  const Comm& stages = dp_.options().stages;
  std::vector<NamedTensor> result = whole_weights(module_, keep_ || stages.size() > 1);
  if (stages.size() > 1) result = gather_stages(result, stages);
  for (NamedTensor& w : result) w.tensor = w.tensor.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  return result;
}

std::vector<CopyDifference> TraceRecorder::copies() {
  const auto full = dp_.gather_full();
  std::vector<CopyDifference> found;
  for (const auto& p : module_.named_parameters()) {
    const nn::TensorPlacement replica{.comm = dp_.comm(), .shape = p.value().sizes().vec(), .dim = -1, .copies = dp_.comm().size()};
    found.push_back({p.key(), "tensor-parallel", nn::copy_difference(p.value(), nn::placement_of(p.value()))});
    found.push_back({p.key(), "data-parallel", nn::copy_difference(p.value(), std::make_shared<nn::TensorPlacement>(replica))});
  }
  if (const Comm& stages = dp_.options().stages; stages.size() > 1) {
    std::vector<std::pair<std::string, double>> tied;
    gather_stages(whole_weights(module_, /*keep=*/true), stages, {}, &tied);
    for (const auto& [name, difference] : tied) found.push_back({name, "pipeline", difference});
  }
  return largest_of(found, world_);
}

void TraceRecorder::step(double loss, double norm, double clip) {
  const at::Tensor range = at::tensor({norm, -norm}, at::kDouble);
  world_.all_reduce(range, ReduceOp::max).wait();
  const double most = range[0].item<double>(), least = -range[1].item<double>();
  trace_.norm_spread = std::max(trace_.norm_spread, most > 0 ? (most - least) / most : 0.0);
  const bool first = trace_.norms.empty();
  trace_.losses.push_back(loss);
  trace_.norms.push_back(norm);
  if (!first) return;
  // So that one wrong gradient does not change the others.
  const double share = clip > 0 ? std::min(1.0, clip / (norm + kClipEpsilon)) : 1.0;
  std::vector<NamedTensor> gradients = parallel::whole_gradients(dp_);
  if (const Comm& stages = dp_.options().stages; stages.size() > 1) gradients = gather_stages(gradients, stages);
  for (NamedTensor& g : gradients) {
    if (keep_) trace_.gradients.push_back({g.name, g.tensor.defined() ? g.tensor.to(at::kDouble) / share : g.tensor});
  }
}

TrainingTrace TraceRecorder::finish() {
  trace_.weights = weights();
  trace_.copies = copies();
  return std::move(trace_);
}

}  // namespace weft::train
