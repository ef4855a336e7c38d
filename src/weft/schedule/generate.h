// Generators: pure functions from sizes to a schedule of compute actions. Any number of micro-batches >= 1, ranks >= 1.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "weft/core/error.h"
#include "weft/schedule/action.h"

namespace weft::schedule {

struct Sizes {
  int ranks = 1;
  int micro_batches = 1;
  int chunks = 1;  ///< stages per rank
};

/// All forwards, then all backwards, micro-batches in the same order; chunk after chunk.
/// Source: Huang et al. 2019, "GPipe".
Schedule gpipe(const Sizes& sizes);

/// One forward, one backward: rank i warms up with min(m, p-1-i) forwards. chunks must be 1.
/// Source: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush).
Schedule one_f_one_b(const Sizes& sizes);

/// 1F1B over several chunks per rank, taken in turn in groups of p micro-batches.
/// Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM".
Schedule interleaved(const Sizes& sizes);

/// 1F1B (interleaved with several chunks) with the backward split; rank i runs W i micro-batches late.
/// Source: Qi et al. 2023, "Zero bubble pipeline parallelism" (ZB-H1).
Schedule zb_h1(const Sizes& sizes);

/// Two chunks per rank placed as a V; no idle slot inside a rank when F = I = W. chunks must be 2.
/// Source: Qi et al. 2023/2024, "Zero bubble pipeline parallelism", "Pipeline parallelism with controllable memory".
Schedule zb_v(const Sizes& sizes);

/// The V placement with overlapped forward-backward pairs. chunks must be 2.
/// Source: DeepSeek-AI 2024/2025, DualPipe folded onto half the ranks.
Schedule dualpipe_v(const Sizes& sizes);

/// Evaluation: forwards only, chunks in turn in groups of p micro-batches.
Schedule forward_only(const Sizes& sizes);

/// What makes the schedules of a pipeline, for the number of micro-batches that a step has. The functions above without sizes:
/// weft::Pipeline pipe(stages, weft::schedule::interleaved(), mesh["pp"], loss_fn).
using Maker = std::function<Schedule(const Sizes&)>;
Maker gpipe();
Maker one_f_one_b();
Maker interleaved();
Maker zb_h1();
Maker zb_v();
Maker dualpipe_v();
/// By the name that a configuration has: "1f1b".
Maker maker(std::string_view name);
/// A schedule of the user's own (from_text, from_csv), for its number of micro-batches alone.
Maker only(Schedule schedule);

/// A generator and its facts, for the command line, configurations and searches.
struct Generator {
  std::string_view name;
  Schedule (*make)(const Sizes&);
  int default_chunks;
  int fixed_chunks;  ///< the only legal number of chunks, or 0 for any
  std::string_view what;
};
const std::vector<Generator>& generators();

/// The generator of that name. Throws ConfigError with the nearest names.
const Generator& find_generator(std::string_view name);

/// What is wrong with sizes for a generator, with legal values; keys are named with `prefix` ("--" on the command
/// line).
Findings check(const Generator& generator, const Sizes& sizes, std::string_view prefix = "");

/// Looks up, checks and generates. Throws ConfigError.
Schedule generate(std::string_view name, const Sizes& sizes);

}  // namespace weft::schedule
