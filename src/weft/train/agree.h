// Agreement between ranks outside the hot path.
#pragma once

#include <functional>
#include <string>

#include "weft/comm/comm.h"

namespace weft::train {

/// ConfigError on every rank, naming the first that differs from rank 0, unless `text` is the same on all. Collective.
void check_equal(const Comm& comm, const std::string& what, const std::string& text);

/// Runs fn on rank 0; if it throws, every rank throws a ConfigError with its text. Collective.
void on_rank_zero(const Comm& comm, const std::function<void()>& fn);

}  // namespace weft::train
