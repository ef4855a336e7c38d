#include "weft/optim/muon.h"

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>

#include "weft/core/error.h"
#include "weft/core/pattern.h"
#include "weft/memory/account.h"
#include "weft/nn/placement.h"
#include "weft/optim/kernels.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {
namespace {

std::vector<int64_t> shape_of(const at::Tensor& parameter) {
  const ShardInfo* shard = shard_info(parameter);
  return shard != nullptr ? shard->shape : parameter.sizes().vec();
}

/// Of the whole matrix, which decides on the order of work and on the scale: the same on all tensor-parallel ranks.
std::vector<int64_t> whole_shape_of(const at::Tensor& parameter) {
  const auto placement = nn::placement_of(parameter);
  return placement ? placement->shape : shape_of(parameter);
}

void check(const MuonOptions& o) {
  check_range("lr", o.lr(), 0);
  check_range("weight_decay", o.weight_decay(), 0);
  check_range("momentum", o.momentum(), 0, 1);
  check_range("beta1", std::get<0>(o.betas()), 0, 1);
  check_range("beta2", std::get<1>(o.betas()), 0, 1);
  check_range("eps", o.eps(), 0);
  check_range("steps", static_cast<double>(o.steps()), 1, 100);
}

double scale_of(const MuonOptions& o, double rows, double columns) {
  return o.match_adamw() ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns));
}

}  // namespace

/// One matrix during a step.
struct Muon::Matrix {
  const MuonOptions* options;
  at::Tensor weight;         ///< flat, fp32 or fp64: this rank's elements, or their masters
  at::Tensor copy;           ///< flat, the 16-bit parameter; undefined if there is no master
  at::Tensor update;         ///< this rank's elements of the momentum, then of the orthogonalised update
  std::vector<int64_t> shape, cuts;  ///< shape: of this tensor-parallel rank's part; cuts: of the shards of it; empty: this rank holds all
  std::vector<int64_t> whole;        ///< shape of the matrix
  std::shared_ptr<const nn::TensorPlacement> placement;

  int64_t numel() const { return shape[0] * shape[1]; }
  int64_t part(int64_t rank) const { return cuts[static_cast<size_t>(rank) + 1] - cuts[static_cast<size_t>(rank)]; }
  /// Every tensor-parallel rank works on the whole matrix, and keeps its part. Collective over these.
  at::Tensor orthogonal(const at::Tensor& part) const {
    const bool cut = placement && placement->dim >= 0 && placement->comm.size() > 1;
    const at::Tensor done = orthogonalise(cut ? nn::whole_tensor(part.view(shape), placement) : part.view(shape), options->steps());
    return (cut ? done.narrow(placement->dim, placement->begin, shape[static_cast<size_t>(placement->dim)]) : done).reshape(-1);
  }
  void apply() const {
    const double lr = options->lr(), scale = scale_of(*options, static_cast<double>(whole[0]), static_cast<double>(whole[1]));
    weight.mul_(1 - lr * options->weight_decay()).add_(update, -lr * scale);
    if (copy.defined()) copy.copy_(weight);
  }
};

at::Tensor orthogonalise(const at::Tensor& matrix, int64_t steps) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315, kEps = 1e-7;
  const bool tall = matrix.size(0) > matrix.size(1);  // products of the smaller side
  at::Tensor x = tall ? matrix.t() : matrix;
  x = x / (at::linalg_vector_norm(x) + kEps);
  for (int64_t i = 0; i < steps; ++i) {
    const at::Tensor a = at::mm(x, x.t());
    const at::Tensor b = at::addmm(a, a, a, kB, kC);
    x = at::addmm(x, b, x, kA, 1);
  }
  return tall ? x.t() : x;
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(orthogonalise);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(steps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(match_adamw);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, orthogonalise);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, steps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, match_adamw);
}

Muon::Muon(const std::vector<OptimizerParamGroup>& groups, MuonOptions defaults, Comm replicas)
    : Optimizer(groups, std::make_unique<MuonOptions>(defaults)), replicas_(std::move(replicas)) {
  keep_options(param_groups_, groups);
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    check(options);
    if (!options.orthogonalise()) continue;
    for (const at::Tensor& p : group.params()) {
      if (shape_of(p).size() == 2) continue;
      const ShardInfo* shard = shard_info(p);
      throw ConfigError("parameter " + (shard != nullptr ? "'" + shard->name + "' " : std::string()) + "of shape " + c10::str(at::IntArrayRef(shape_of(p))) +
                        " is no matrix, and Muon orthogonalises matrices. Put it in a group with MuonOptions().orthogonalise(false), "
                        "as muon_groups() does");
    }
  }
}

NamedState& Muon::state_of(const at::Tensor& parameter) {
  auto& slot = state_[parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<NamedState>();
  auto& state = static_cast<NamedState&>(*slot);
  ++state.step;
  return state;
}

at::Tensor Muon::step(LossClosure closure) {
  const at::Tensor loss = evaluate(closure);
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::optimizer);
  std::vector<std::pair<const at::Tensor*, const MuonOptions*>> matrices;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const at::Tensor& p : group.params()) {
      if (!p.grad().defined()) continue;
      require_dense(p, p.grad());
      if (options.orthogonalise()) {
        matrices.emplace_back(&p, &options);
      } else {
        update_elementwise(p, options);
      }
    }
  }
  // The largest first, so that matrices of a round are alike and ranks wait little for each other.
  std::ranges::stable_sort(matrices, std::greater(), [](const auto& m) {
    const std::vector<int64_t> shape = whole_shape_of(*m.first);
    return shape[0] * shape[1];
  });
  bool backwards = false;
  for (size_t next = 0; next < matrices.size(); backwards = !backwards) {
    const ShardInfo* shard = shard_info(*matrices[next].first);
    const Comm ranks = shard != nullptr ? shard->ranks : replicas_;
    std::vector<Matrix> round;
    // Shards of two DataParallels in one optimizer have ranks of their own.
    for (; next < matrices.size() && round.size() < static_cast<size_t>(ranks.size()); ++next) {
      const ShardInfo* other = shard_info(*matrices[next].first);
      if ((other != nullptr ? other->ranks : replicas_).state() != ranks.state()) break;
      round.push_back(open(*matrices[next].first, *matrices[next].second));
    }
    update_round(ranks, round, backwards);
  }
  notify_updated(param_groups_);
  return loss;
}

/// Brings the momentum up to date.
Muon::Matrix Muon::open(const at::Tensor& parameter, const MuonOptions& options) {
  const Kept kept(parameter, state_of(parameter), {{.name = "momentum_buffer", .dtype = wide_dtype(parameter.scalar_type())}});
  const at::Tensor& buffer = kept.states[0];
  const at::Tensor grad = kept.grad.to(buffer.scalar_type());
  buffer.lerp_(grad, 1 - options.momentum());
  Matrix matrix{.options = &options,
                .weight = kept.weight,
                .copy = kept.copy,
                .update = options.nesterov() ? grad.lerp(buffer, options.momentum()) : buffer.clone(),
                .shape = shape_of(parameter),
                .cuts = {},
                .whole = whole_shape_of(parameter),
                .placement = nn::placement_of(parameter)};
  if (const ShardInfo* shard = shard_info(parameter)) matrix.cuts = shard->cuts;
  return matrix;
}

void Muon::update_elementwise(const at::Tensor& parameter, const MuonOptions& options) {
  NamedState& state = state_of(parameter);
  const at::ScalarType wide = wide_dtype(parameter.scalar_type());
  const Kept kept(parameter, state, {{.name = "exp_avg", .dtype = wide}, {.name = "exp_avg_sq", .dtype = wide}});
  const auto [beta1, beta2] = options.betas();
  adamw_update({.lr = options.lr(), .beta1 = beta1, .beta2 = beta2, .eps = options.eps(), .weight_decay = options.weight_decay(), .step = state.step},
               kept.weight, kept.grad, kept.states[0], kept.states[1], kept.copy);
}

/// One matrix per rank at most: the k-th goes to rank k, or counted from the last rank.
void Muon::update_round(const Comm& ranks, std::vector<Matrix>& round, bool backwards) {
  const int64_t n = ranks.size(), me = ranks.rank();
  const auto count = static_cast<int64_t>(round.size());
  const auto matrix_of = [&](int64_t rank) -> Matrix* {
    const int64_t k = backwards ? n - 1 - rank : rank;
    return k < count ? &round[static_cast<size_t>(k)] : nullptr;
  };
  Matrix* mine = matrix_of(me);
  if (round.front().cuts.empty()) {
    if (mine != nullptr) mine->update = mine->orthogonal(mine->update).contiguous();
    for (int64_t owner = 0; owner < n; ++owner) {
      if (Matrix* matrix = matrix_of(owner)) ranks.broadcast(matrix->update, static_cast<int>(owner)).released();
    }
  } else {
    std::vector<at::Tensor> parts;
    std::vector<int64_t> parts_of_owners, parts_of_mine(static_cast<size_t>(n), 0);
    for (int64_t owner = 0; owner < n; ++owner) {
      const Matrix* matrix = matrix_of(owner);
      parts_of_owners.push_back(matrix != nullptr ? matrix->update.numel() : 0);
      if (matrix != nullptr) parts.push_back(matrix->update);
      if (mine != nullptr) parts_of_mine[static_cast<size_t>(owner)] = mine->part(owner);
    }
    at::Tensor to_owners = at::cat(parts);
    at::Tensor whole = at::empty({mine != nullptr ? mine->numel() : 0}, to_owners.options());
    ranks.all_to_all(whole, to_owners, parts_of_mine, parts_of_owners).released();
    if (mine != nullptr) whole = mine->orthogonal(whole);
    ranks.all_to_all(to_owners, whole.contiguous(), parts_of_owners, parts_of_mine).released();
    int64_t at = 0;
    for (int64_t owner = 0; owner < n; ++owner) {
      Matrix* matrix = matrix_of(owner);
      if (matrix != nullptr) matrix->update = to_owners.narrow(0, at, matrix->update.numel());
      at += parts_of_owners[static_cast<size_t>(owner)];
    }
  }
  for (const Matrix& matrix : round) matrix.apply();
}

void Muon::save(torch::serialize::OutputArchive& archive) const { torch::optim::serialize<NamedState, MuonOptions>(archive, *this); }
void Muon::load(torch::serialize::InputArchive& archive) { torch::optim::serialize<NamedState, MuonOptions>(archive, *this); }

std::vector<OptimizerParamGroup> muon_groups(const DataParallel& dp, const MuonOptions& options, const std::string& others) {
  std::vector<at::Tensor> hidden, matrices, rest;
  for (size_t i = 0; i < dp.parameters().size(); ++i) {
    const NamedTensor& p = dp.parameters()[i];
    const bool matrix = p.tensor.dim() == 2;
    (matrix && !matches(others, p.name) ? hidden : p.tensor.dim() >= 2 ? matrices : rest).push_back(dp.shards()[i].tensor);
  }
  std::vector<OptimizerParamGroup> groups;
  const auto add = [&](std::vector<at::Tensor>& members, const MuonOptions& o) {
    if (!members.empty()) groups.emplace_back(std::move(members), std::make_unique<MuonOptions>(o));
  };
  add(hidden, MuonOptions(options).orthogonalise(true));
  add(matrices, MuonOptions(options).orthogonalise(false));
  add(rest, MuonOptions(options).orthogonalise(false).weight_decay(0));
  return groups;
}

}  // namespace weft::optim
