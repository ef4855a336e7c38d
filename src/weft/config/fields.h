// The table of all configuration keys. Parsing, overrides, --explain-config and the written copy are driven by it.
#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "weft/config/run_config.h"

namespace weft::config {

/// Where a value lives; the alternative is the key's type.
using Slot = std::variant<bool*, int64_t*, double*, std::string*>;

/// What a value must fulfil beyond its type.
struct Rule {
  double low = -1e300;
  double high = 1e300;
  bool low_allowed = true;                ///< false: strictly above `low`
  std::vector<std::string> choices = {};  ///< of a text; empty: any

  /// Why the value in `slot` breaks the rule ("-3 is out of range (at least 1)"), or nothing.
  std::string broken_by(const Slot& slot) const;
};

struct Field {
  std::string key;  ///< section.name
  std::string help;
  Rule rule;
  std::function<Slot(RunConfig&)> slot;
};

/// Every key, section by section, in the order of --explain-config.
const std::vector<Field>& fields();

/// Null if there is no such key.
const Field* find_field(const std::string& key);

/// "whole number", "number", "text" or "true or false".
std::string type_name(const Slot& slot);

}  // namespace weft::config
