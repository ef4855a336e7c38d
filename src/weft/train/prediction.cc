#include "weft/train/prediction.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <vector>

#include "weft/core/units.h"
#include "weft/data/token_file.h"
#include "weft/plan/estimate.h"
#include "weft/train/learner.h"
#include "weft/train/rehearse.h"

namespace weft::train {
namespace {

/// The same job with at most two micro-batches per step.
config::RunConfig shortened(const Job& job, int64_t ranks) {
  config::RunConfig config = job.config;
  config.train.micro_batch = job.accumulation.micro_batch;
  config.train.global_batch = std::min(config.train.global_batch, 2 * ranks * job.accumulation.micro_batch);
  return config;
}

/// A token file for as long as it is needed; every rank writes its own.
class ReferenceData {
 public:
  ReferenceData(int64_t vocab, int64_t tokens) : path_(std::filesystem::temp_directory_path() / fmt::format("weft-calibrate-{}.bin", ::getpid())) {
    data::TokenWriter writer(path_.string(), vocab, "bytes");
    std::vector<uint32_t> ids(static_cast<size_t>(tokens));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>((i * 7 + i / 13) % static_cast<size_t>(vocab));
    writer.append(ids);
    writer.finish();
  }
  ~ReferenceData() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  ReferenceData(const ReferenceData&) = delete;
  ReferenceData& operator=(const ReferenceData&) = delete;

  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

config::RunConfig reference_config(const std::string& data, const std::string& dtype, int64_t ranks) {
  config::RunConfig config;
  config.model.layers = 4;
  config.model.hidden = 256;
  config.model.heads = 4;
  config.model.vocab = 512;
  config.data.train = data;
  config.data.seq = 256;
  config.train.micro_batch = 4;
  config.train.global_batch = 4 * ranks;
  config.train.steps = 1000;
  config.train.dtype = dtype;
  return config;
}

std::string line(const char* name, const std::string& predicted, const std::string& measured, double ratio) {
  return fmt::format("{:<12}{:>12}{:>12}{:>+9.1f}%\n", name, predicted, measured, 100 * (ratio - 1));
}

}  // namespace

plan::Job plan_job(const Job& job, int64_t ranks, const machine::Machine& machine) {
  using machine::Software;
  plan::Job out;
  out.sequence = job.config.data.seq;
  out.model = plan::ModelSummary::of(job.spec, out.sequence);
  out.machine = machine;
  out.precision = machine::parse_precision(job.config.train.dtype);
  out.software.graphs = true;        // operations were measured from start to end
  out.software.overlap_dp = false;   // ranks of one machine copy with the cores that compute
  out.software.loss = Software::Loss::in_place;
  if (gradient_type(job) != at::kFloat) out.software.gradients = Software::Gradients::half;
  out.layout.dp = ranks;
  out.layout.zero = static_cast<int>(job.config.parallel.zero);
  out.layout.shard_group = job.config.parallel.zero > 0 ? job.config.parallel.dp_shard : 0;
  out.layout.micro_batch = job.accumulation.micro_batch;
  out.layout.global_batch = ranks * job.accumulation.micro_batch * job.accumulation.steps;
  return out;
}

Prediction predict(const Job& job, int ranks, const std::optional<machine::Machine>& machine) {
  Prediction prediction;
  try {
    prediction.peak_bytes = rehearse(shortened(job, ranks), 0, ranks).memory.peak;
  } catch (const std::exception& error) {
    prediction.missing = fmt::format("no memory predicted: {}", error.what());
  }
  if (!machine || job.config.layout.pp > 1) return prediction;  // a pipeline prints its schedule's bubble instead
  if (job.config.train.dtype == "fp64") {
    prediction.missing = "no time predicted: machines are measured in fp32 and bf16";
    return prediction;
  }
  prediction.step_s = plan::step_time(plan_job(job, ranks, *machine), {}).step;
  return prediction;
}

Reference measure_reference(const World& world, const std::string& dtype, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLeast = 5, kMost = 200;
  constexpr int64_t kTokens = 100000;
  const ReferenceData file(512, kTokens);
  Reference reference{make_job(reference_config(file.path(), dtype, world.size()), world.size())};
  const Axes axes = make_axes(reference.job, world);
  const data::TrainBatches batches = train_batches(reference.job, axes.dp);
  Learner learner(reference.job, axes);
  const auto step = [&](int64_t update) {
    const auto start = Clock::now();
    learner.accumulate(batches, update);
    learner.apply(reference.job.config.optimizer.lr);
    world.comm().barrier();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  step(0);
  // All ranks make the same number of steps.
  at::Tensor pace = at::full({1}, step(1), at::kDouble);
  world.comm().all_reduce(pace, ReduceOp::max).wait();
  const int steps = std::clamp(static_cast<int>(seconds / pace.item<double>()), kLeast, kMost);
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) times.push_back(step(2 + i));
  std::nth_element(times.begin(), times.begin() + steps / 2, times.end());
  reference.step_s = times[static_cast<size_t>(steps / 2)];
  return reference;
}

std::string comparison(const Prediction& prediction, int64_t peak_bytes, double step_s) {
  std::string out;
  if (prediction.peak_bytes && peak_bytes > 0) {
    const auto predicted = static_cast<double>(*prediction.peak_bytes), measured = static_cast<double>(peak_bytes);
    out += line("peak memory", bytes_text(predicted), bytes_text(measured), predicted / measured);
  }
  if (prediction.step_s && step_s > 0) out += line("step", seconds_text(*prediction.step_s), seconds_text(step_s), *prediction.step_s / step_s);
  if (!out.empty()) out = fmt::format("{:<12}{:>12}{:>12}   (rank 0)\n", "", "predicted", "measured") + out;
  if (!prediction.missing.empty()) out += prediction.missing + "\n";
  return out;
}

}  // namespace weft::train
