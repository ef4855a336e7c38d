// Options that `weft plan`, `weft estimate` and `weft simulate` share: model, machine, batch and software.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

#include "weft/cost/tuning.h"
#include "weft/machine/machine.h"
#include "weft/model/spec.h"
#include "weft/plan/campaign.h"
#include "weft/plan/program.h"

namespace weft::cli {

/// For option->check(): a finite number from `low` (or above it, if `above`) to `high`; the error has value and rule.
CLI::Validator number_in(double low, double high, bool above = false);

struct JobOptions {
  std::string model = "llama3-8b";
  std::string machine = "h100";
  std::string precision = "bf16";
  int64_t sequence = 0;  ///< 0: the model's context, at most 8192
  int64_t batch = 256;
  int64_t devices = 8;
  double nic_gbits = 0;  ///< 0: the device's usual NIC
  int64_t node_devices = 0;
  double host_memory_gib = -1;  ///< of a node; -1: the usual node's
  bool eager = false, overlap_tp = false;
  plan::Rates rates;
  std::string program;  ///< file of weft::describe: a module of the user's own instead of a model
  std::string config;  ///< a training configuration that fills what the command line leaves out
  std::vector<std::string> constants;
  bool json = false;
  int64_t micro_batch = 0;                 ///< of the training configuration; 0: not said
  std::optional<int64_t> zero;             ///< of the training configuration
  int64_t shard_group = 0;                 ///< of the training configuration: ranks that share one copy; 0: all
  bool half_gradients = false;             ///< of the training configuration: 16-bit gradients
  std::optional<model::ModelSpec> from_config;

  void add_to(CLI::App& command);
  /// Preset name or path of a Hugging Face config.json.
  model::ModelSpec spec() const;
  /// Takes what the training configuration says and no option does: model, sequence, batch, precision, ranks, and for one layout
  /// micro-batch and sharding.
  void read_config(const CLI::App& command);
  machine::Machine resolved_machine() const;
  machine::Software software() const;
  /// The job of --spec, with zero 0 and micro-batch 1.
  plan::ProgramJob program_job() const;
  int64_t resolved_sequence(const model::ModelSpec& spec) const;
  cost::Tuning tuning() const;
};

}  // namespace weft::cli
