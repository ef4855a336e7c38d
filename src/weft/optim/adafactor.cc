#include "weft/optim/adafactor.h"

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>

#include "weft/core/error.h"
#include "weft/memory/account.h"
#include "weft/optim/tensor_parts.h"
#include "weft/parallel/shard_owner.h"

namespace weft::optim {
namespace {

template <class T>
double sum_of_squares(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

at::Tensor factor_of(NamedState& state, const char* name, int64_t numel, const at::Tensor& weight) {
  at::Tensor& factor = state.tensors[name];
  if (!factor.defined()) factor = at::zeros({numel}, weight.options());
  if (factor.numel() == numel && factor.dtype() == weight.dtype()) return factor;
  throw ConfigError(std::string("a loaded optimizer state '") + name + "' has " + std::to_string(factor.numel()) + " numbers of type " +
                    c10::toString(factor.scalar_type()) + "; the parameter needs " + std::to_string(numel) + " of type " +
                    c10::toString(weight.scalar_type()) + ". Load it into an optimizer of the same parameters");
}

void check(const AdafactorOptions& o) {
  check_range("lr", o.lr(), 0);
  check_range("beta1", o.beta1(), 0, 1);
  check_range("decay_power", o.decay_power(), 0, 1);
  check_range("eps 1", std::get<0>(o.eps()), 0);
  check_range("eps 2", std::get<1>(o.eps()), 0);
  check_range("clip_threshold", o.clip_threshold(), 1e-6);
  check_range("weight_decay", o.weight_decay(), 0);
}

}  // namespace

/// One parameter during a step. `sums` are this rank's parts until they are reduced.
struct Adafactor::Member {
  const AdafactorOptions* options;
  at::Tensor weight, grad, copy;       ///< flat; weight and grad fp32 or fp64
  at::Tensor rows, columns;            ///< of a matrix
  at::Tensor second;                   ///< [n] of others
  at::Tensor first;                    ///< [n] with momentum
  int64_t step, numel;                 ///< numel: of the whole parameter
  TensorPart part;
  bool counts = true;                  ///< whether this rank's sums are added to the others'
  double alpha = 0, shrink = 1;        ///< the parameter's rate; what clipping leaves of the update

  bool factored() const { return rows.defined(); }
  int64_t sums() const { return 1 + (factored() ? rows.numel() + columns.numel() : 0); }

  /// sums: the parameter's squares, then squared gradients by row and by column.
  template <class T>
  void add_sums(double* sums) const;
  void take_sums(const double* sums);
  /// Calls fn(offset, updates, length) with the updates before clipping, row by row.
  template <class T, class Fn>
  void for_updates(const Fn& fn) const;
  template <class T>
  double squares_of_updates() const;
  template <class T>
  void apply() const;
};

template <class T>
void Adafactor::Member::add_sums(double* sums) const {
  if (counts) sums[0] += sum_of_squares(weight.const_data_ptr<T>(), weight.numel());
  const T* g = grad.const_data_ptr<T>();
  const double eps = std::get<0>(options->eps());
  if (factored()) {
    if (!counts) return;
    double* by_row = sums + 1;
    double* by_column = by_row + rows.numel();
    part.for_rows(0, weight.numel(), [&](int64_t row, int64_t column, int64_t at, int64_t n) {
      double sum = 0;
      for (int64_t k = 0; k < n; ++k) {
        const double square = static_cast<double>(g[at + k]) * static_cast<double>(g[at + k]) + eps;
        sum += square;
        by_column[column + k] += square;
      }
      by_row[row] += sum;
    });
    return;
  }
  const auto beta2 = static_cast<T>(1 - std::pow(static_cast<double>(step), -options->decay_power()));
  T* v = second.mutable_data_ptr<T>();
  for (int64_t i = 0; i < weight.numel(); ++i) v[i] = beta2 * v[i] + (1 - beta2) * (g[i] * g[i] + static_cast<T>(eps));
}

/// Means in place of the paper's sums: their quotient is the same, and their size does not depend on the matrix's.
void Adafactor::Member::take_sums(const double* sums) {
  const double rms = std::sqrt(sums[0] / static_cast<double>(std::max<int64_t>(numel, 1)));
  alpha = options->lr() * (options->scale_parameter() ? std::max(std::get<1>(options->eps()), rms) : 1.0);
  if (!factored()) return;
  const double beta2 = 1 - std::pow(static_cast<double>(step), -options->decay_power());
  const int64_t r = rows.numel(), c = columns.numel();
  const auto mix = [&](const at::Tensor& factor, const double* sum, int64_t others) {
    const at::Tensor mean = at::from_blob(const_cast<double*>(sum), {factor.numel()}, at::kDouble) / static_cast<double>(others);
    factor.copy_(factor.to(at::kDouble) * beta2 + mean * (1 - beta2));
  };
  mix(rows, sums + 1, c);
  mix(columns, sums + 1 + r, r);
}

template <class T, class Fn>
void Adafactor::Member::for_updates(const Fn& fn) const {
  const T* g = grad.const_data_ptr<T>();
  std::vector<T> update;
  if (!factored()) {
    constexpr int64_t kPiece = 4096;
    const T* v = second.const_data_ptr<T>();
    for (int64_t at = 0; at < weight.numel(); at += kPiece) {
      const int64_t n = std::min(kPiece, weight.numel() - at);
      update.resize(static_cast<size_t>(n));
      for (int64_t k = 0; k < n; ++k) update[static_cast<size_t>(k)] = g[at + k] / std::sqrt(v[at + k]);
      fn(at, update.data(), n);
    }
    return;
  }
  const at::Tensor row = rows.to(at::kDouble), column = columns.to(at::kDouble);
  const at::Tensor by_row = (row / row.mean()).rsqrt(), by_column = column.rsqrt().to(weight.scalar_type());
  const double* rr = by_row.const_data_ptr<double>();
  const T* cc = by_column.const_data_ptr<T>();
  update.resize(static_cast<size_t>(columns.numel()));
  part.for_rows(0, weight.numel(), [&](int64_t r, int64_t c, int64_t at, int64_t n) {
    const auto scale = static_cast<T>(rr[r]);
    for (int64_t k = 0; k < n; ++k) update[static_cast<size_t>(k)] = g[at + k] * scale * cc[c + k];
    fn(at, update.data(), n);
  });
}

template <class T>
double Adafactor::Member::squares_of_updates() const {
  double sum = 0;
  for_updates<T>([&](int64_t, const T* u, int64_t n) { sum += sum_of_squares(u, n); });
  return sum;
}

template <class T>
void Adafactor::Member::apply() const {
  T* w = weight.mutable_data_ptr<T>();
  T* m = first.defined() ? first.mutable_data_ptr<T>() : nullptr;
  const auto beta1 = static_cast<T>(options->beta1()), rest = static_cast<T>(1 - options->beta1());
  const auto decay = static_cast<T>(1 - alpha * options->weight_decay()), rate = static_cast<T>(alpha), keep = static_cast<T>(shrink);
  for_updates<T>([&](int64_t at, const T* update, int64_t n) {
    for (int64_t k = 0; k < n; ++k) {
      T u = update[k] * keep;
      if (m != nullptr) u = m[at + k] = beta1 * m[at + k] + rest * u;
      w[at + k] = w[at + k] * decay - rate * u;
    }
  });
  if (copy.defined()) copy.copy_(weight);
}

void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(scale_parameter);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta1);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(decay_power);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(clip_threshold);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, scale_parameter);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta1);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, decay_power);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, clip_threshold);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(eps_t, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

Adafactor::Adafactor(const std::vector<OptimizerParamGroup>& groups, AdafactorOptions defaults)
    : Optimizer(groups, std::make_unique<AdafactorOptions>(defaults)) {
  keep_options(param_groups_, groups);
  for (const auto& group : param_groups_) check(static_cast<const AdafactorOptions&>(group.options()));
}

Adafactor::Member Adafactor::open(const at::Tensor& parameter, const AdafactorOptions& options) {
  auto& slot = state_[parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<NamedState>();
  auto& state = static_cast<NamedState&>(*slot);
  TensorPart part = tensor_part(parameter);
  const std::vector<int64_t>& shape = part.shape;
  const int64_t numel = part.numel();
  const bool factored = shape.size() >= 2 && numel > 0;
  const at::ScalarType wide = wide_dtype(parameter.scalar_type());
  std::vector<StateSpec> specs;
  if (!factored) specs.push_back({.name = "exp_avg_sq", .dtype = wide});
  if (options.beta1() > 0) specs.push_back({.name = "exp_avg", .dtype = wide});
  const Kept kept(parameter, state, specs);
  Member member{.options = &options, .weight = kept.weight, .grad = kept.grad.to(wide), .copy = kept.copy, .rows = {}, .columns = {},
                .second = {}, .first = {}, .step = ++state.step, .numel = numel, .part = part};
  if (options.beta1() > 0) member.first = kept.states.back();
  if (!factored) {
    member.second = kept.states.front();
    return member;
  }
  member.rows = factor_of(state, "row_mean_sq", numel / shape.back(), kept.weight);
  member.columns = factor_of(state, "column_mean_sq", shape.back(), kept.weight);
  return member;
}

at::Tensor Adafactor::step(LossClosure closure) {
  const at::Tensor loss = evaluate(closure);
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::optimizer);
  std::vector<Member> members;
  Comm ranks;
  bool mixed = false;
  for (auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      if (!p.grad().defined()) continue;
      require_dense(p, p.grad());
      const ShardInfo* shard = shard_info(p);
      if (shard != nullptr) {
        mixed = mixed || (ranks.size() > 1 && shard->ranks.state() != ranks.state());
        ranks = shard->ranks;
      }
      members.push_back(open(p, static_cast<const AdafactorOptions&>(group.options())));
    }
  }
  if (mixed) throw ConfigError("Adafactor was given shards of two DataParallels, whose ranks differ. Make one Adafactor for each");
  std::vector<TensorPart> parts;
  for (const Member& member : members) parts.push_back(member.part);
  const Comm tp = tensor_ranks(parts, "Adafactor");
  for (Member& member : members) member.counts = member.part.placement ? member.part.placement->counts() : tp.rank() == 0;
  update(members, ranks, tp);
  notify_updated(param_groups_);
  return loss;
}

/// Sums that concern whole parameters are those of all ranks where the parameter is sharded.
void Adafactor::update(std::vector<Member>& members, const Comm& ranks, const Comm& tp) {
  const auto dispatch = [](const Member& member, const auto& fn) {
    if (member.weight.is_meta()) return;
    member.weight.scalar_type() == at::kDouble ? fn(double{}) : fn(float{});
  };
  int64_t count = 0;
  for (const Member& member : members) count += member.sums();
  at::Tensor sums = at::zeros({count}, at::kDouble);
  double* at = sums.mutable_data_ptr<double>();
  for (const Member& member : members) {
    dispatch(member, [&](auto zero) { member.add_sums<decltype(zero)>(at); });
    at += member.sums();
  }
  ranks.all_reduce(sums).released();
  tp.all_reduce(sums).released();
  at = sums.mutable_data_ptr<double>();
  for (Member& member : members) {
    if (!member.weight.is_meta()) member.take_sums(at);
    at += member.sums();
  }
  at::Tensor squares = at::zeros({static_cast<int64_t>(members.size())}, at::kDouble);
  double* square = squares.mutable_data_ptr<double>();
  for (size_t i = 0; i < members.size(); ++i) {
    dispatch(members[i], [&](auto zero) { square[i] = members[i].counts ? members[i].squares_of_updates<decltype(zero)>() : 0; });
  }
  ranks.all_reduce(squares).released();
  tp.all_reduce(squares).released();
  for (size_t i = 0; i < members.size(); ++i) {
    Member& member = members[i];
    const double rms = std::sqrt(square[i] / static_cast<double>(std::max<int64_t>(member.numel, 1)));
    member.shrink = 1 / std::max(1.0, rms / member.options->clip_threshold());
    dispatch(member, [&](auto zero) { member.apply<decltype(zero)>(); });
  }
}

void Adafactor::save(torch::serialize::OutputArchive& archive) const { torch::optim::serialize<NamedState, AdafactorOptions>(archive, *this); }
void Adafactor::load(torch::serialize::InputArchive& archive) { torch::optim::serialize<NamedState, AdafactorOptions>(archive, *this); }

}  // namespace weft::optim
