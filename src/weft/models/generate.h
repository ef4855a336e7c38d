// Text generation, one token at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/models/transformer.h"

namespace weft::models {

struct GenerateOptions {
  double temperature = 1.0;  ///< 0: always the most likely token
  int64_t top_k = 0;         ///< draw among the k most likely tokens; 0: among all
  uint64_t seed = 0;         ///< token i of a run is a function of (seed, i) and the model alone
};

/// Continues `prompt` (at least one token id) by `count` tokens and returns these. Keys and values are kept, so a token
/// costs one column of the model; past the model's context the last half of it is read again and goes on from there.
/// Runs without dropout and without gradients; the model's training mode is restored.
std::vector<int64_t> generate(Transformer& model, const std::vector<int64_t>& prompt, int64_t count, const GenerateOptions& options = {});

}  // namespace weft::models
