#include "weft/plan/program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "weft/core/error.h"
#include "weft/core/nearest.h"
#include "weft/core/units.h"
#include "weft/cost/collective.h"
#include "weft/cost/gemm.h"
#include "weft/cost/memory.h"
#include "weft/plan/report.h"

namespace weft::plan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr double kFits = 0.9;
constexpr int kStages = 4;
constexpr const char* kVersion = "weft_program";

struct Field {
  const char* name;
  double ProgramSpec::*value;
};
constexpr Field kFields[] = {{"parameters", &ProgramSpec::parameters},       {"trainable", &ProgramSpec::trainable},
                             {"largest_unit", &ProgramSpec::largest_unit},   {"forward_flops", &ProgramSpec::forward_flops},
                             {"backward_flops", &ProgramSpec::backward_flops}, {"saved_bytes", &ProgramSpec::saved_bytes},
                             {"peak_bytes", &ProgramSpec::peak_bytes},       {"moved_bytes", &ProgramSpec::moved_bytes},
                             {"kernels", &ProgramSpec::kernels}};

/// Bytes of an activation here over those that were counted.
double width(const ProgramJob& job) { return (job.precision == machine::Precision::fp32 ? 4.0 : 2.0) / static_cast<double>(job.spec.element); }

cost::StateBytes state_of(const ProgramJob& job) {
  if (job.precision == machine::Precision::fp32) return {4, 4, 8};
  return {2, job.software.gradients == machine::Software::Gradients::half ? 2.0 : 4.0, 12};
}

Memory memory_of(const ProgramJob& job, const cost::Tuning& tuning) {
  const ProgramSpec& spec = job.spec;
  const cost::StateBytes state = state_of(job);
  const auto ranks = static_cast<double>(job.devices);
  const auto share = [&](int from) { return job.zero >= from ? ranks : 1.0; };
  const double scale = static_cast<double>(job.micro_batch) / static_cast<double>(spec.samples) * width(job);
  Memory memory;
  memory.weights = state.weight * spec.parameters / share(3);
  memory.gradients = state.gradient * spec.trainable / share(2);
  memory.optimizer = state.optimizer * spec.trainable / share(1);
  memory.activations = spec.saved_bytes * scale;
  memory.transient = std::max(0.0, spec.peak_bytes - spec.saved_bytes) * scale;
  memory.transient += static_cast<double>(spec.element) * width(job) * spec.largest_unit;  // a gradient before it is in its buffer
  // Two Units are gathered, and one has all of its gradient.
  if (job.zero == 3 && job.devices > 1) memory.transient += (2 * state.weight + state.gradient) * spec.largest_unit;
  if (job.zero == 2 && job.devices > 1) memory.transient += state.gradient * spec.largest_unit;
  const bool calibrated = job.machine.device.calibrated;
  memory.reserve = calibrated ? 0 : tuning.dynamic_reserve_share * memory.allocated();
  memory.context = calibrated ? 0 : tuning.context_gib * kGiB;
  memory.fit_probability = fit_probability(memory.needed(), job.machine.device.memory_gib * kGiB, tuning.fit_sigma);
  return memory;
}

Time time_of(const ProgramJob& job, const cost::Tuning& tuning) {
  constexpr double kPasses = 3;  // two operands are read, one result is written
  const ProgramSpec& spec = job.spec;
  const cost::Rates rates = cost::Rates::of(job.machine.device, job.precision, tuning);
  const auto ranks = static_cast<double>(job.devices), passes = static_cast<double>(job.micro_batches());
  const double scale = passes * static_cast<double>(job.micro_batch) / static_cast<double>(spec.samples);
  Time time;
  time.gemm = scale * (spec.forward_flops + spec.backward_flops) / rates.matmul;
  time.memory = scale * kPasses * spec.moved_bytes * width(job) / rates.memory + passes * spec.kernels * rates.gap;
  const cost::StateBytes state = state_of(job);
  const double gradients = state.gradient * spec.trainable, weights = state.weight * spec.parameters;
  const cost::Group group = cost::group_of(job.machine, job.devices, 1, tuning);
  if (job.zero == 0) time.dp = cost::all_reduce_time(gradients, group);
  else if (job.zero == 1) time.dp = cost::all_gather_time(gradients, group) + cost::all_gather_time(weights, group);
  else if (job.zero == 2) time.dp = passes * cost::all_gather_time(gradients, group) + cost::all_gather_time(weights, group);
  else time.dp = passes * (cost::all_gather_time(gradients, group) + 2 * cost::all_gather_time(weights, group));
  if (!job.machine.device.calibrated) time.dp = std::max(0.1 * time.dp, time.dp - 2.0 / 3 * (time.gemm + time.memory));  // behind backward
  const double read_and_written = (2 * state.optimizer + state.gradient + state.weight) * spec.trainable;
  time.optimizer = read_and_written / (job.zero >= 1 ? ranks : 1) / rates.memory;
  const double sum = time.gemm + time.memory + time.dp + time.optimizer;
  time.fixed = sum * tuning.straggler * std::log2(std::max(1.0, ranks));
  time.step = sum + time.fixed;
  time.step_p95 = kP95OverMedian * time.step;
  return time;
}

std::string layout_text(const ProgramJob& job) { return fmt::format("dp{} zero{} mb{}", job.devices, job.zero, job.micro_batch); }

std::vector<std::string> words(const ProgramPlan& plan) {
  static constexpr const char* kWhy[] = {"model states fit on every device: plain data parallelism sends least (zero 0)",
                                         "the optimizer's state is divided (zero 1): as little traffic as zero 0, less memory",
                                         "gradients are divided as well (zero 2), because the optimizer's state alone does not free enough",
                                         "parameters are divided too (zero 3): nothing else fits; they are gathered twice per micro-batch"};
  std::vector<std::string> out;
  if (plan.ranked.empty()) out.push_back("nothing fits with 90%: use more devices, a smaller batch per device, or recompute in the module (weft::set_recompute), and describe it again");
  else out.push_back(kWhy[plan.ranked.front().job.zero]);
  out.push_back("a module of one's own is divided over data-parallel ranks; for tensor parallelism wrap its layers (weft::parallelize) and describe one rank's part");
  return out;
}

}  // namespace

Json to_json(const ProgramSpec& spec) {
  Json json = {{kVersion, 1}, {"name", spec.name}, {"samples", spec.samples}, {"element_bytes", spec.element}};
  for (const Field& field : kFields) json[field.name] = spec.*field.value;
  return json;
}

ProgramSpec program_from_json(const Json& json, const std::string& source) {
  Findings findings;
  if (!json.is_object() || !json.contains(kVersion)) throw ConfigError(fmt::format("{}: no description of a program (the key {} is missing); weft::describe writes one", source, kVersion));
  ProgramSpec spec;
  std::vector<std::string> names{kVersion, "name", "samples", "element_bytes"};
  for (const Field& field : kFields) names.push_back(field.name);
  for (const auto& [key, value] : json.items())
    if (std::find(names.begin(), names.end(), key) == names.end()) findings.add(source + " " + key, "unknown key", fmt::format("did you mean {}?", nearest(key, names).front()));
  const auto number = [&](const char* key, double least) {
    constexpr double kMost = 1e24;
    if (!json.contains(key)) return findings.add(source + " " + key, "is missing", "weft::describe writes every key"), least;
    if (!json[key].is_number()) return findings.add(source + " " + key, "is no number"), least;
    const double value = json[key].get<double>();
    if (!(value >= least) || value > kMost) findings.add(source + " " + key, fmt::format("{:g}; the rule is {:g} <= {} <= {:g}", value, least, key, kMost));
    return value;
  };
  if (json.contains("name") && json["name"].is_string()) spec.name = json["name"].get<std::string>();
  const double samples = number("samples", 1), element = number("element_bytes", 1);
  for (const Field& field : kFields) spec.*field.value = number(field.name, 0);
  findings.throw_if_any(source);
  spec.samples = static_cast<int64_t>(samples);
  spec.element = static_cast<int64_t>(element);
  return spec;
}

ProgramSpec read_program(const std::filesystem::path& path) { return program_from_json(read_json(path), path.string()); }

void check(const ProgramJob& job) {
  Findings findings;
  if (job.devices < 1) findings.add("devices", fmt::format("{}; the rule is devices >= 1", job.devices), "give the number of accelerators");
  if (job.zero < 0 || job.zero >= kStages) findings.add("zero", fmt::format("{}; the rule is 0 <= zero <= 3", job.zero), "0 DDP, 1 optimizer, 2 gradients, 3 parameters");
  if (job.devices >= 1 && (job.global_batch < 1 || job.global_batch % job.devices != 0))
    findings.add("batch", fmt::format("{} samples do not divide over {} ranks", job.global_batch, job.devices), fmt::format("batch = {}", std::max<int64_t>(1, (job.global_batch + job.devices / 2) / job.devices) * job.devices));
  else if (job.devices >= 1 && (job.micro_batch < 1 || job.global_batch / job.devices % job.micro_batch != 0))
    findings.add("micro-batch", fmt::format("{} does not divide the {} samples of a rank", job.micro_batch, job.global_batch / job.devices), fmt::format("micro-batch = {}", fmt::join(divisors(job.global_batch / job.devices), ", ")));
  findings.throw_if_any("the layout of " + job.spec.name);
}

ProgramEstimate estimate(const ProgramJob& job, const cost::Tuning& tuning) {
  check(job);
  ProgramEstimate out{.job = job, .memory = memory_of(job, tuning), .time = time_of(job, tuning)};
  out.samples_per_second = static_cast<double>(job.global_batch) / out.time.step;
  return out;
}

ProgramPlan search(const ProgramJob& asked, const cost::Tuning& tuning) {
  ProgramJob job = asked;
  job.zero = 0;
  job.micro_batch = 1;
  check(job);
  ProgramPlan plan;
  for (job.zero = 0; job.zero < (job.devices > 1 ? kStages : 1); ++job.zero) {
    bool fits = false;
    for (const int64_t micro_batch : divisors(job.global_batch / job.devices)) {
      job.micro_batch = micro_batch;
      const ProgramEstimate one = estimate(job, tuning);
      if (one.memory.fit_probability < kFits) {
        if (micro_batch == 1) plan.rejected.push_back(one);
        break;  // larger ones need more
      }
      fits = true;
      plan.ranked.push_back(one);
    }
    if (fits) std::erase_if(plan.rejected, [&](const ProgramEstimate& e) { return e.job.zero == job.zero; });
  }
  std::stable_sort(plan.ranked.begin(), plan.ranked.end(), [](const auto& a, const auto& b) { return a.samples_per_second > b.samples_per_second; });
  plan.why = words(plan);
  return plan;
}

Json program_json(const ProgramEstimate& e) {
  return {{"layout", {{"dp", e.job.devices}, {"zero", e.job.zero}, {"micro_batch", e.job.micro_batch}, {"micro_batches", e.job.micro_batches()}, {"global_batch", e.job.global_batch}}},
          {"memory",
           {{"weights_gib", e.memory.weights / kGiB}, {"gradients_gib", e.memory.gradients / kGiB}, {"optimizer_gib", e.memory.optimizer / kGiB}, {"activations_gib", e.memory.activations / kGiB}, {"transient_gib", e.memory.transient / kGiB},
            {"allocated_gib", e.memory.allocated() / kGiB}, {"device_gib", e.memory.device() / kGiB}, {"fit_probability", e.memory.fit_probability}}},
          {"time", {{"gemm_s", e.time.gemm}, {"memory_s", e.time.memory}, {"dp_s", e.time.dp}, {"optimizer_s", e.time.optimizer}, {"step_s", e.time.step}, {"step_p95_s", e.time.step_p95}}},
          {"samples_per_second", e.samples_per_second}};
}

Json program_plan_json(const ProgramPlan& plan, size_t top) {
  Json json = {{"ranked", Json::array()}, {"rejected", Json::array()}, {"explanation", plan.why}};
  for (size_t i = 0; i < std::min(top, plan.ranked.size()); ++i) json["ranked"].push_back(program_json(plan.ranked[i]));
  for (const ProgramEstimate& e : plan.rejected) json["rejected"].push_back(program_json(e));
  return json;
}

std::string program_text(const ProgramEstimate& e) {
  const Memory& m = e.memory;
  std::string out = fmt::format("{}: {} parameters on {} x {}, {}, {} samples a step\n\nmemory of a rank\n", e.job.spec.name, count_text(e.job.spec.parameters), e.job.devices, e.job.machine.device.name, layout_text(e.job), e.job.global_batch);
  for (const auto& [name, bytes] : {std::pair{"weights", m.weights}, {"gradients", m.gradients}, {"optimizer state", m.optimizer}, {"activations", m.activations}, {"transient", m.transient}, {"allocator and context", m.reserve + m.context}})
    out += fmt::format("  {:<22}{:>12}  {}\n", name, bytes_text(bytes), bar(bytes / m.device(), 30));
  out += fmt::format("  {:<22}{:>12}  of {:.1f} GiB: fits with {:.0f}%\n\ntime of a step\n", "all", bytes_text(m.device()), e.job.machine.device.memory_gib, 100 * m.fit_probability);
  for (const auto& [name, seconds] : {std::pair{"products", e.time.gemm}, {"memory-bound kernels", e.time.memory}, {"exposed communication", e.time.dp}, {"optimizer", e.time.optimizer}})
    out += fmt::format("  {:<22}{:>12}  {}\n", name, seconds_text(seconds), bar(seconds / e.time.step, 30));
  return out + fmt::format("  {:<22}{:>12}  {}\n", "step", seconds_text(e.time.step), rate_text(e.samples_per_second, "samples"));
}

std::string program_plan_text(const ProgramPlan& plan, size_t top) {
  std::string out;
  if (!plan.ranked.empty()) {
    out += fmt::format("  {:<22}{:>12}{:>16}{:>12}{:>8}\n", "layout", "step", "samples/s", "memory", "fits");
    for (size_t i = 0; i < std::min(top, plan.ranked.size()); ++i) {
      const ProgramEstimate& e = plan.ranked[i];
      out += fmt::format("  {:<22}{:>12}{:>16.4g}{:>12}{:>7.0f}%\n", layout_text(e.job), seconds_text(e.time.step), e.samples_per_second, bytes_text(e.memory.device()), 100 * e.memory.fit_probability);
    }
  }
  if (!plan.rejected.empty()) out += "\nWhat does not fit\n";
  for (const ProgramEstimate& e : plan.rejected)
    out += fmt::format("  {:<22}over by {}\n", layout_text(e.job), bytes_text(std::max(0.0, e.memory.needed() - e.job.machine.device.memory_gib * kGiB)));
  out += "\nWhy\n";
  for (const std::string& line : plan.why) out += "  " + line + "\n";
  return out;
}

}  // namespace weft::plan
