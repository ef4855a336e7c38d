#include "weft/cli/layout_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "weft/core/error.h"

namespace weft::cli {
namespace {

layout::Recompute parse_recompute(const std::string& name) {
  for (layout::Recompute recompute : {layout::Recompute::none, layout::Recompute::attention, layout::Recompute::half, layout::Recompute::full})
    if (name == layout::recompute_name(recompute)) return recompute;
  throw ConfigError("--recompute " + name + ": use none, attention, half or full");
}

}  // namespace

layout::Layout LayoutOptions::resolved(const JobOptions& job, const model::ModelSpec& spec) const {
  layout::Layout layout = this->layout;
  layout.recompute = parse_recompute(recompute);
  layout.global_batch = job.batch;
  if (job.micro_batch > 0 && !said("--micro-batch")) layout.micro_batch = job.micro_batch;
  if (job.zero && !said("--zero")) layout.zero = static_cast<int>(*job.zero);
  if (job.zero && !said("--shard-group")) layout.shard_group = job.shard_group;
  layout.sequence_parallel = layout.tp > 1 && !no_sequence_parallel;
  Findings findings;
  const int64_t model_ranks = layout.pp * layout.cp * layout.tp;
  if (job.devices < 1) {
    findings.add("devices", fmt::format("{}; the rule is devices >= 1", job.devices), "give the number of accelerators");
  } else if (model_ranks < 1 || job.devices % model_ranks != 0) {
    findings.add("devices", fmt::format("pp * cp * tp = {} does not divide {} devices", model_ranks, job.devices),
                 "pp * cp * tp = " + layout::nearest_divisors(job.devices, std::max<int64_t>(1, model_ranks)));
  } else {
    layout.dp = job.devices / model_ranks;
    if (dp > 0 && dp != layout.dp)
      findings.add("dp", fmt::format("{}, but {} devices over pp * cp * tp = {} leave {}", dp, job.devices, model_ranks, layout.dp), fmt::format("dp = {}", layout.dp));
  }
  findings.throw_if_any("the layout");
  layout::check(layout, spec).throw_if_any("the layout");
  return layout;
}

bool LayoutOptions::said(const char* option) const { return command_ != nullptr && command_->count(option) > 0; }

void LayoutOptions::add_to(CLI::App& command) {
  command_ = &command;
  command.add_option("--tp", layout.tp, "tensor-parallel degree")->capture_default_str();
  command.add_option("--pp", layout.pp, "pipeline stages")->capture_default_str();
  command.add_option("--chunks", layout.chunks, "model chunks per stage (interleaving)")->capture_default_str();
  command.add_option("--cp", layout.cp, "context-parallel degree")->capture_default_str();
  command.add_option("--ep", layout.ep, "expert-parallel degree")->capture_default_str();
  command.add_option("--etp", layout.etp, "tensor-parallel degree inside experts")->capture_default_str();
  command.add_option("--dp", dp, "replicas; default: what the devices leave");
  command.add_option("--zero", layout.zero, "0 DDP, 1 optimizer, 2 gradients, 3 parameters (FSDP)")->capture_default_str();
  command.add_option("--shard-group", layout.shard_group, "ranks that share one copy of the sharded state (HSDP); 0: all");
  command.add_option("--micro-batch", layout.micro_batch, "sequences per replica and micro-batch")->capture_default_str();
  command.add_option("--recompute", recompute, "none, attention, half or full")->capture_default_str();
  command.add_option("--schedule", layout.schedule, "1f1b, gpipe, zb-h1, zb-h2 (closed form only) or zb-v")->capture_default_str();
  command.add_flag("--offload", layout.offload, "optimizer state and step in host memory");
  command.add_flag("--no-sequence-parallel", no_sequence_parallel, "norms on whole sequences inside tensor parallelism");
}

plan::ProgramJob program_job_of(const JobOptions& options, const LayoutOptions& layout) {
  plan::ProgramJob job = options.program_job();
  const layout::Layout& asked = layout.layout;
  Findings findings;
  for (const auto& [name, degree] : {std::pair{"tp", asked.tp}, {"pp", asked.pp}, {"cp", asked.cp}, {"ep", asked.ep}})
    if (degree != 1) findings.add(name, fmt::format("{}; a module of --spec is divided over data-parallel ranks alone", degree), fmt::format("{} = 1", name));
  if (layout.recompute != "none") findings.add("recompute", layout.recompute + "; what was described is what runs", "weft::set_recompute in the program, and describe it again");
  findings.throw_if_any("the layout of " + job.spec.name);
  job.zero = static_cast<int>(asked.zero);
  job.micro_batch = asked.micro_batch;
  return job;
}

plan::Job job_of(const JobOptions& options, const LayoutOptions& layout) {
  const model::ModelSpec spec = options.spec();
  plan::Job job;
  job.sequence = options.resolved_sequence(spec);
  if (job.sequence < 1) throw ConfigError(fmt::format("--seq {}: a sequence has at least one token", job.sequence));
  job.layout = layout.resolved(options, spec);
  job.model = plan::ModelSummary::of(spec, job.sequence);
  job.machine = options.resolved_machine();
  job.software = options.software();
  job.precision = machine::parse_precision(options.precision);
  return job;
}

}  // namespace weft::cli
