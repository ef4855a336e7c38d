// From a Unit's calls, and the gradients that come to its outputs, to the engine that gathers it.
#pragma once

#include <memory>

#include "weft/nn/unit_hooks.h"
#include "weft/parallel/round_engine.h"
#include "weft/parallel/unit_gathers.h"

namespace weft::parallel {

/// Unit `unit` of `gathers`, which `engine` owns; both may be gone when the Unit is called. Keep it: Units hold it weakly.
std::shared_ptr<nn::UnitHooks> watch_unit(std::weak_ptr<RoundEngine> engine, UnitGathers& gathers, size_t unit);

}  // namespace weft::parallel
