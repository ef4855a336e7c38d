#include "weft/nn/activations.h"

#include <fmt/format.h>

#include <vector>

#include "weft/core/error.h"
#include "weft/core/pattern.h"
#include "weft/nn/unit_hooks.h"

namespace weft {
namespace {

struct Named {
  std::string name;
  nn::UnitBase* unit;
};

/// In the order of registration.
std::vector<Named> units_named(torch::nn::Module& module, const std::string& pattern, const char* what) {
  std::vector<Named> found;
  std::string known;
  for (const auto& item : module.named_modules()) {
    auto* const unit = dynamic_cast<nn::UnitBase*>(item.value().get());
    if (unit == nullptr) continue;
    known += (known.empty() ? "" : ", ") + item.key();
    if (matches(pattern, item.key())) found.push_back({item.key(), unit});
  }
  if (!found.empty()) return found;
  throw ConfigError(fmt::format("{} of units '{}', and the module has no such Unit. Its Units: {}", what, pattern,
                                known.empty() ? "none; make its blocks weft::Unit<Block>" : known));
}

}  // namespace

int64_t set_recompute(torch::nn::Module& module, const RecomputeOptions& options) {
  if (options.every < 1) throw ConfigError(fmt::format("recompute of every {} Units: it must be at least 1", options.every));
  const std::vector<Named> named = units_named(module, options.units, "recompute");
  const auto every = static_cast<size_t>(options.every);
  for (size_t i = 0; i < named.size(); i += every) {
    if (options.mode == Recompute::none || !named[i].unit->activations().on_host) continue;
    throw ConfigError(fmt::format("unit '{}' keeps its activations on the host, so that there is nothing to recompute. Take it out of one "
                                  "of the two", named[i].name));
  }
  for (size_t i = 0; i < named.size(); i += every) {
    autograd::ActivationRule rule = named[i].unit->activations();
    rule.unit = named[i].name;
    rule.recompute = options.mode;
    named[i].unit->set_activations(rule);
  }
  return static_cast<int64_t>((named.size() + every - 1) / every);
}

int64_t offload_activations(torch::nn::Module& module, const std::string& units, bool on) {
  const std::vector<Named> named = units_named(module, units, "offload of activations");
  for (const Named& n : named) {
    if (!on || n.unit->activations().recompute == Recompute::none) continue;
    throw ConfigError(fmt::format("unit '{}' is recomputed (Recompute::{}), so that there is nothing to offload. Take it out of one of the two",
                                  n.name, recompute_name(n.unit->activations().recompute)));
  }
  for (const Named& n : named) {
    autograd::ActivationRule rule = n.unit->activations();
    rule.unit = n.name;
    rule.on_host = on;
    n.unit->set_activations(rule);
  }
  return static_cast<int64_t>(named.size());
}

}  // namespace weft
