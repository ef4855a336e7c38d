#include "weft/cli/job_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "weft/config/check.h"
#include "weft/config/machine_file.h"
#include "weft/config/parse.h"
#include "weft/core/error.h"
#include "weft/machine/local.h"
#include "weft/model/hf_config.h"
#include "weft/model/presets.h"

namespace weft::cli {
namespace {

// No job comes near these; they keep products of sizes finite and make slips of the keyboard errors.
constexpr double kMostDevices = 1e7, kMostBatch = 1e9, kMostTokens = 1e8, kMostGbits = 1e6, kMostWatts = 1e6, kMostPrice = 1e9, kMostConstant = 1e6, kMostHostGib = 1e6;

}  // namespace

CLI::Validator number_in(double low, double high, bool above) {
  const auto rule = [=](const std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (end != text.c_str() && *end == '\0' && (above ? value > low : value >= low) && value <= high) return {};
    return fmt::format("{} is out of range ({} {:g}, at most {:g})", text, above ? "more than" : "at least", low, high);
  };
  return CLI::Validator(rule, "");
}

void JobOptions::add_to(CLI::App& command) {
  command.add_option("--model", model, "preset (llama3-70b, gpt3-175b, ...) or path of a Hugging Face config.json")->capture_default_str();
  command.add_option("--spec", program, "file that weft::describe wrote of a module of your own, instead of --model; --batch counts its samples")->excludes(command.get_option("--model"));
  command.add_option("--machine", machine, "accelerator (h100, a100, b200, gb200, mi300x, ...), local for this machine, or a file of weft bench calibrate")->capture_default_str();
  command.add_option("--devices", devices, "number of accelerators")->check(number_in(1, kMostDevices))->capture_default_str();
  command.add_option("--batch", batch, "sequences per step over all devices")->check(number_in(1, kMostBatch))->capture_default_str();
  command.add_option("--seq", sequence, "tokens per sequence; default: the model's context, at most 8192")->check(number_in(1, kMostTokens));
  command.add_option("--precision", precision, "bf16, fp16, fp8, fp4 or fp32")->capture_default_str();
  command.add_option("--nic", nic_gbits, "network bandwidth per device in Gbit/s; default: the device's usual NIC")->check(number_in(0, kMostGbits, true));
  command.add_option("--node", node_devices, "devices per node; default: the usual node")->check(number_in(1, kMostDevices));
  command.add_option("--host-memory", host_memory_gib, "GiB of a node's host, for offloading; default: the usual node's")->check(number_in(0, kMostHostGib));
  command.add_flag("--eager", eager, "unfused kernels, as in PyTorch without a compiler");
  command.add_flag("--overlap-tp", overlap_tp, "tensor-parallel communication is split and overlapped");
  command.add_option("--price", rates.price, "price of one device-hour")->check(number_in(0, kMostPrice));
  command.add_option("--watts", rates.watts, "power of one device with its share of host and cooling: energy per token")->check(number_in(0, kMostWatts));
  command.add_option("--config", config, "training configuration (TOML, of weft train): model, sequence, batch, precision, ranks, micro-batch and sharding where no option says otherwise");
  command.add_option("--constant", constants, "NAME=VALUE: replaces a constant of the cost model, for calibration");
  command.add_flag("--json", json, "one JSON object on stdout");
}

void JobOptions::read_config(const CLI::App& command) {
  if (config.empty()) return;
  std::ifstream in(config);
  if (!in) throw ConfigError("--config " + config + ": the file cannot be read");
  std::stringstream text;
  text << in.rdbuf();
  Findings findings;
  const config::RunConfig run = config::parse(text.str(), config, findings);
  findings.throw_if_any(config);
  const auto said = [&](const char* option) { return command.count(option) > 0; };
  if (!said("--model")) from_config = config::model_spec(run, 0);
  if (!said("--seq")) sequence = run.data.seq;
  if (!said("--batch")) batch = run.train.global_batch;
  if (!said("--precision")) precision = run.train.dtype == "fp64" ? "fp32" : run.train.dtype;
  if (!said("--devices") && run.layout.dp > 0) devices = run.layout.dp;
  micro_batch = run.train.micro_batch > 0 ? run.train.micro_batch : std::max<int64_t>(1, batch / std::max<int64_t>(1, devices));
  zero = run.parallel.zero;
  shard_group = run.parallel.zero > 0 ? run.parallel.dp_shard : 0;
  half_gradients = run.train.gradient_dtype == "bf16" || run.train.gradient_dtype == "fp16";
}

model::ModelSpec JobOptions::spec() const {
  if (from_config) return *from_config;
  if (model.ends_with(".json")) return model::read_hf_config(model);
  return model::preset(model);
}

machine::Machine JobOptions::resolved_machine() const {
  machine::Machine resolved = machine.ends_with(".toml") ? config::read_machine(machine) : machine == "local" ? machine::machine_of(machine::detect_local()) : machine::Machine::of(machine);
  if (nic_gbits > 0) resolved.nic_gbits = nic_gbits;
  if (node_devices > 0) {
    if (resolved.link_domain <= resolved.node_devices) resolved.link_domain = node_devices;
    resolved.host_memory_gib *= static_cast<double>(node_devices) / static_cast<double>(resolved.node_devices);
    resolved.node_devices = node_devices;
  }
  if (host_memory_gib >= 0) resolved.host_memory_gib = host_memory_gib;
  return resolved;
}

plan::ProgramJob JobOptions::program_job() const {
  if (!config.empty()) throw ConfigError("--spec describes a module of your own and --config a model of weft train: use one of them");
  return {.spec = plan::read_program(program), .machine = resolved_machine(), .software = software(), .precision = machine::parse_precision(precision), .devices = devices, .global_batch = batch};
}

machine::Software JobOptions::software() const {
  machine::Software software;
  if (eager) software.kernels = machine::Software::Kernels::eager, software.overlap_tp_backward = false;
  // Operations of a measured machine were timed from start to end: nothing waits for the host beside them.
  if (machine.ends_with(".toml")) software.graphs = true;
  software.overlap_tp = overlap_tp;
  if (half_gradients) software.gradients = machine::Software::Gradients::half;
  return software;
}

int64_t JobOptions::resolved_sequence(const model::ModelSpec& spec) const {
  if (sequence != 0) return sequence;
  constexpr int64_t kUsual = 8192;  // pre-training rarely uses longer sequences than this
  return spec.context > 0 ? std::min(spec.context, kUsual) : kUsual;
}

cost::Tuning JobOptions::tuning() const {
  cost::Tuning tuning;
  for (const std::string& setting : constants) {
    const size_t equals = setting.find('=');
    char* end = nullptr;
    const double value = equals == std::string::npos ? 0 : std::strtod(setting.c_str() + equals + 1, &end);
    if (end == nullptr || *end != '\0' || end == setting.c_str() + equals + 1) throw ConfigError("--constant " + setting + ": the form is NAME=VALUE with a number");
    if (!(value >= 0) || value > kMostConstant) throw ConfigError("--constant " + setting + ": constants are shares, times and sizes, at least 0 and at most 1e6");
    cost::set_constant(tuning, setting.substr(0, equals), value);
  }
  return tuning;
}

}  // namespace weft::cli
