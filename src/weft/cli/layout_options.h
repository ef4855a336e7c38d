// Options that `weft estimate` and `weft simulate` share: one layout, given degree by degree.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

#include "weft/cli/job_options.h"
#include "weft/layout/layout.h"
#include "weft/plan/job.h"

namespace weft::cli {

struct LayoutOptions {
  layout::Layout layout{.zero = 1};
  int64_t dp = 0;  ///< 0: what the devices leave
  std::string recompute = "none";
  bool no_sequence_parallel = false;

  void add_to(CLI::App& command);
  /// Fills dp from the devices when it is not given, and checks the whole layout against the model.
  layout::Layout resolved(const JobOptions& job, const model::ModelSpec& spec) const;

 private:
  bool said(const char* option) const;

  const CLI::App* command_ = nullptr;
};

/// The layout of --spec: data-parallel ranks. ConfigError for degrees that divide a model.
plan::ProgramJob program_job_of(const JobOptions& options, const LayoutOptions& layout);
/// Model, machine and layout together. Throws ConfigError with every finding.
plan::Job job_of(const JobOptions& job, const LayoutOptions& layout);

}  // namespace weft::cli
