// Layouts as text, for comparing them: "dp=2; tp=2; dp_shard=2,zero=3,tp=2".
#pragma once

#include <string>
#include <vector>

#include "weft/config/run_config.h"
#include "weft/parallel/data_parallel.h"

namespace weft::train {

/// Layouts apart by ";", settings by ",". Short names dp, tp, pp, schedule, chunks, zero, dp_shard, sequence_parallel, tp_overlap,
/// reshard_after_forward, reshard_group, prefetch, micro_batch, or with `any_key` any key of the configuration. ConfigError names what is not
/// understood.
std::vector<std::string> split_layouts(const std::string& text, bool any_key = true);

/// `base` on one rank, then with the settings of one layout. Without dp there are dp_shard data-parallel ranks, or one.
config::RunConfig with_layout(config::RunConfig base, const std::string& layout, bool any_key = true);

/// Ranks of a configuration whose layout is complete.
int64_t ranks_of(const config::RunConfig& config);

/// The dial's position and what belongs to it.
void set_sharding(const config::ParallelConfig& parallel, DataParallelOptions& options);

}  // namespace weft::train
