// A program's own module as weft::describe counted it, and what data-parallel layouts of it need: the planner for models that are no
// list of transformer blocks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "weft/core/json.h"
#include "weft/cost/tuning.h"
#include "weft/machine/machine.h"
#include "weft/plan/estimate.h"

namespace weft::plan {

/// One counted forward and backward of `samples` samples. Bytes and FLOPs are of all of them.
struct ProgramSpec {
  std::string name;
  int64_t samples = 1;            ///< first dim of the first example input
  int64_t element = 4;            ///< bytes of most parameters' elements
  double parameters = 0;
  double trainable = 0;
  double largest_unit = 0;        ///< parameters of the largest child: what ZeRO-3 gathers at once when children are Units
  double forward_flops = 0;       ///< products, convolutions and attention; 2 per multiply-add
  double backward_flops = 0;
  double saved_bytes = 0;         ///< alive after forward: what backward needs, and the result
  double peak_bytes = 0;          ///< highest during forward and backward, without parameters and their gradients
  double moved_bytes = 0;         ///< results that were allocated: each is written once
  double kernels = 0;             ///< allocations: about one a kernel
};

Json to_json(const ProgramSpec& spec);
/// ConfigError with all findings: a missing or unknown key, a count that is negative or no number.
ProgramSpec program_from_json(const Json& json, const std::string& source);
ProgramSpec read_program(const std::filesystem::path& path);

/// Data-parallel ranks that train the program.
struct ProgramJob {
  ProgramSpec spec;
  machine::Machine machine;
  machine::Software software;
  machine::Precision precision = machine::Precision::fp32;
  int64_t devices = 1;
  int64_t global_batch = 1;  ///< samples a step
  int zero = 0;
  int64_t micro_batch = 1;   ///< samples of a rank at once

  int64_t micro_batches() const { return global_batch / (devices * micro_batch); }
};

struct ProgramEstimate {
  ProgramJob job;
  Memory memory;
  Time time;
  double samples_per_second = 0;
};

/// ConfigError with every finding when the batch does not divide, or a degree makes no sense.
void check(const ProgramJob& job);

/// Memory: states by ZeRO stage (adamw), activations of one micro-batch, gathered Units. Time: counted FLOPs at the rate of large
/// products, three passes over the memory of every result, a gap per kernel, and reduction as for any model. Small layers reach less
/// than large products do: without a calibrated machine the time is a lower bound.
ProgramEstimate estimate(const ProgramJob& job, const cost::Tuning& tuning);

struct ProgramPlan {
  std::vector<ProgramEstimate> ranked;          ///< best first: those that fit with 90%
  std::vector<ProgramEstimate> rejected;        ///< per ZeRO stage that never fits, its smallest layout
  std::vector<std::string> why;
};
/// Every ZeRO stage with every micro-batch that divides; `job.zero` and `job.micro_batch` are not read.
ProgramPlan search(const ProgramJob& job, const cost::Tuning& tuning);

Json program_json(const ProgramEstimate& estimate);
Json program_plan_json(const ProgramPlan& plan, size_t top);
std::string program_text(const ProgramEstimate& estimate);
std::string program_plan_text(const ProgramPlan& plan, size_t top);

}  // namespace weft::plan
