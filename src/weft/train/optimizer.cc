#include "weft/train/optimizer.h"

#include <map>
#include <utility>

#include "weft/config/check.h"
#include "weft/core/pattern.h"
#include "weft/cost/memory.h"
#include "weft/optim/adafactor.h"
#include "weft/optim/adam8bit.h"
#include "weft/optim/lion.h"
#include "weft/optim/muon.h"
#include "weft/optim/optim.h"

namespace weft::train {
namespace {

enum class Kind { hidden, matrix, other };  ///< hidden: a matrix that muon orthogonalises

Kind kind_of(const config::OptimizerConfig& c, const std::string& name, size_t dims) {
  if (dims < 2) return Kind::other;
  return dims == 2 && !matches(c.adamw_for, name) ? Kind::hidden : Kind::matrix;
}

struct Members {
  Kind kind;
  double share;
  std::vector<at::Tensor> shards;
};

/// Shards with the same kind and share together, in the order of their first.
std::vector<Members> members_of(const config::OptimizerConfig& c, const DataParallel& dp) {
  Findings findings;
  const std::vector<config::RateRule> rules = config::rate_rules(c, findings);
  std::vector<bool> used(rules.size(), false);
  std::map<std::pair<Kind, size_t>, size_t> places;
  std::vector<Members> all;
  for (size_t i = 0; i < dp.parameters().size(); ++i) {
    const NamedTensor& p = dp.parameters()[i];
    size_t rule = 0;
    while (rule < rules.size() && !matches(rules[rule].names, p.name)) ++rule;
    if (rule < rules.size()) used[rule] = true;
    const Kind kind = kind_of(c, p.name, static_cast<size_t>(p.tensor.dim()));
    const auto [place, fresh] = places.emplace(std::pair(kind, rule), all.size());
    if (fresh) all.push_back({.kind = kind, .share = rule < rules.size() ? rules[rule].share : 1.0, .shards = {}});
    all[place->second].shards.push_back(dp.shards()[i].tensor);
  }
  for (size_t i = 0; i < rules.size(); ++i) {
    if (used[i]) continue;
    findings.add("optimizer.rates", "\"" + rules[i].names + "\" names no parameter that an earlier rule does not",
                 "the first is '" + dp.parameters().front().name + "'");
  }
  findings.throw_if_any("configuration");
  return all;
}

template <class Options, class Change>
RunOptimizer make(const std::vector<Members>& all, const Options& options, const Change& make_it) {
  std::vector<optim::OptimizerParamGroup> groups;
  RunOptimizer result;
  for (const Members& members : all) {
    Options own = options;
    if (members.kind == Kind::other) own.weight_decay(0);
    if constexpr (std::is_same_v<Options, optim::MuonOptions>) own.orthogonalise(members.kind == Kind::hidden);
    groups.emplace_back(members.shards, std::make_unique<Options>(own));
    result.shares.push_back(members.share);
  }
  result.optimizer = make_it(groups, options);
  return result;
}

}  // namespace

RunOptimizer make_optimizer(const config::OptimizerConfig& c, const DataParallel& dp) {
  using Groups = std::vector<optim::OptimizerParamGroup>;
  const std::vector<Members> all = members_of(c, dp);
  if (c.name == "sgd") {
    return make(all, optim::SGDOptions(c.lr).momentum(config::momentum(c)).weight_decay(c.weight_decay),
                [](const Groups& groups, const auto& options) { return std::make_unique<optim::SGD>(groups, options); });
  }
  if (c.name == "lion") {
    return make(all, optim::LionOptions(c.lr).betas({c.beta1, c.beta2}).weight_decay(c.weight_decay),
                [](const Groups& groups, const auto& options) { return std::make_unique<optim::Lion>(groups, options); });
  }
  if (c.name == "adafactor") {
    return make(all, optim::AdafactorOptions(c.lr).weight_decay(c.weight_decay),
                [](const Groups& groups, const auto& options) { return std::make_unique<optim::Adafactor>(groups, options); });
  }
  if (c.name == "muon") {
    const Comm replicas = dp.options().sharding == Sharding::none ? dp.comm() : Comm();
    const auto options = optim::MuonOptions(c.lr).betas({c.beta1, c.beta2}).eps(c.eps).weight_decay(c.weight_decay).momentum(config::momentum(c));
    return make(all, options, [&](const Groups& groups, const auto& o) { return std::make_unique<optim::Muon>(groups, o, replicas); });
  }
  const auto options = optim::AdamWOptions(c.lr).betas({c.beta1, c.beta2}).eps(c.eps).weight_decay(c.weight_decay);
  if (c.name == "adam8bit") {
    return make(all, options, [](const Groups& groups, const auto& o) { return std::make_unique<optim::Adam8bit>(groups, o); });
  }
  return make(all, options, [&](const Groups& groups, const auto& o) {
    auto adamw = std::make_unique<optim::AdamW>(groups, o);
    if (c.moments_dtype == "bf16") adamw->keep_moments_in_bf16();
    return adamw;
  });
}

std::vector<Granule> granules_of(const config::OptimizerConfig& c) {
  if (c.name != "adam8bit") return {};
  return {{.parameters = "*", .elements = optim::kQuantBlock}};
}

double moment_bytes(const config::OptimizerConfig& c, const std::string& name, const std::vector<int64_t>& shape, double wide) {
  if (c.name == "adamw") return cost::moment_bytes(c.moments_dtype == "bf16" ? "adamw_bf16" : "adamw", shape, wide);
  if (c.name == "sgd" && config::momentum(c) == 0) return 0;
  if (c.name == "muon" && kind_of(c, name, shape.size()) != Kind::hidden) return cost::moment_bytes("adamw", shape, wide);
  return cost::moment_bytes(c.name, shape, wide);
}

}  // namespace weft::train
