// Validation loss over all ranks.
#pragma once

#include "weft/comm/comm.h"
#include "weft/data/batches.h"
#include "weft/models/transformer.h"
#include "weft/parallel/pipeline/pipeline.h"

namespace weft::train {

/// Mean loss per target over `limit` samples spread evenly over the file (0 or more than there are: all). Each sample
/// is counted exactly once over the ranks, however their number divides; sums and counts are added up, never means.
/// With a pipeline, whose stages `model` has, all ranks of it pass the same. Collective. Leaves the model in training mode.
double evaluate(models::Transformer& model, const data::TokenSamples& samples, int64_t limit, int64_t micro_batch,
                const Comm& comm, Pipeline* pipeline = nullptr);

}  // namespace weft::train
