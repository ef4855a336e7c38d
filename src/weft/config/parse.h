// TOML text and command-line overrides to a RunConfig and back.
#pragma once

#include <string>
#include <vector>

#include "weft/config/run_config.h"
#include "weft/core/error.h"

namespace weft::config {

/// Reads `text` over the defaults. Every problem becomes a finding: "NAME:LINE key: what (remedy)"; unknown keys name
/// the nearest known one. A syntax error is the only finding of its file.
RunConfig parse(const std::string& text, const std::string& name, Findings& findings);

/// The keys of a file of `weft plan --out` as overrides "section.key=value". ConfigError when it asks for what `weft train` has no key for,
/// or is no TOML.
std::vector<std::string> read_plan(const std::string& path);

/// Reads a file ("": the defaults), applies overrides "section.key=value" in order, checks everything that needs no other part.
/// ConfigError with all findings. In overrides text needs no quotes.
RunConfig load(const std::string& path, const std::vector<std::string>& overrides = {});

/// Applies one override; problems become findings.
void override_key(RunConfig& config, const std::string& assignment, Findings& findings);

/// Every key with its value as TOML that parse() reads back to the same configuration. With help: each key's meaning
/// above it.
std::string to_toml(const RunConfig& config, bool with_help);

}  // namespace weft::config
