#include "weft/train/training_trace.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "weft/nn/placement.h"
#include "weft/parallel/whole.h"
#include "weft/train/weights.h"

namespace weft::train {
namespace {

/// Of parallel/gradient_norm.cc.
constexpr double kClipEpsilon = 1e-6;

}  // namespace

TraceRecorder::TraceRecorder(const torch::nn::Module& module, DataParallel& dp, Comm world, bool keep)
    : module_(module), dp_(dp), world_(std::move(world)), keep_(keep) {
  trace_.starts = weights();
  trace_.start_copies = copies();
}

std::vector<NamedTensor> TraceRecorder::weights() {
  const auto full = dp_.gather_full();
  std::vector<NamedTensor> result = whole_weights(module_, keep_);
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
  // Each rank has seen the groups that it is in.
  const at::Tensor worst = at::zeros({static_cast<int64_t>(found.size())}, at::kDouble);
  for (size_t i = 0; i < found.size(); ++i) worst[static_cast<int64_t>(i)] = found[i].difference;
  world_.all_reduce(worst, ReduceOp::max).wait();
  for (size_t i = 0; i < found.size(); ++i) found[i].difference = worst[static_cast<int64_t>(i)].item<double>();
  return found;
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
  for (NamedTensor& g : parallel::whole_gradients(dp_)) {
    if (keep_) trace_.gradients.push_back({g.name, g.tensor.defined() ? g.tensor.to(at::kDouble) / share : g.tensor});
  }
}

TrainingTrace TraceRecorder::finish() {
  trace_.weights = weights();
  trace_.copies = copies();
  return std::move(trace_);
}

}  // namespace weft::train
