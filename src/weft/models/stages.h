// A decoder as the stages of a pipeline.
#pragma once

#include <vector>

#include "weft/models/transformer.h"
#include "weft/parallel/pipeline/stage.h"

namespace weft::models {

/// `spec` cut into `stages` stretches, each of a block, the embedding or the head at least, such that the dearest has as few FLOPs per token as can
/// be (sequences of `sequence` tokens). Every block is in one of them. ConfigError for more stages than blocks + 2.
std::vector<StagePart> stage_parts(const model::ModelSpec& spec, int64_t stages, double sequence);

/// The parts of `all` that `rank` holds.
std::vector<StagePart> parts_of_rank(const std::vector<StagePart>& all, const std::vector<int>& owner, int rank);

/// Names of the side inputs that the stages of a Transformer want: tokens [B, T] int64 on every stage, and place [2] int64 (step and first sample
/// of nn::TokenPlace).
inline constexpr const char* kTokens = "tokens";
inline constexpr const char* kPlace = "place";
SideInputs side_inputs(const at::Tensor& tokens, const nn::TokenPlace& place);

/// Stages of `model`, which was built with parts_of_rank(all, owner, rank). Stage 0 takes the tokens, the last gives hidden states for loss_of(). The
/// embedding of a model with a tied head is a tied parameter.
Stages stages_of(Transformer& model, const std::vector<StagePart>& all, const std::vector<int>& owner, int rank);

}  // namespace weft::models
