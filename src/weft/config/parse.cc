#include "weft/config/parse.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "weft/config/check.h"
#include "weft/config/fields.h"
#include "weft/core/nearest.h"

namespace weft::config {
namespace {

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  for (const Field& field : fields()) keys.push_back(field.key);
  return keys;
}

bool is_section(const std::string& name) {
  for (const Field& field : fields()) {
    if (field.key.rfind(name + ".", 0) == 0) return true;
  }
  return false;
}

std::string unknown_key_remedy(const std::string& key) {
  // A key typed without its section, or in a wrong one: same last word first.
  const std::string last = key.substr(key.rfind('.') + 1);
  for (const Field& field : fields()) {
    if (field.key.substr(field.key.find('.') + 1) == last) return fmt::format("did you mean {}?", field.key);
  }
  return fmt::format("did you mean {}?", nearest(key, all_keys()).front());
}

/// Stores a node in a slot; false if its type is another. Whole numbers are numbers; 3.0 is no whole number.
bool assign(const Slot& slot, const toml::node& node) {
  return std::visit(
      [&](auto* target) {
        using Type = std::remove_pointer_t<decltype(target)>;
        if constexpr (std::is_same_v<Type, double>) {
          if (!node.is_number()) return false;
        }
        const auto value = std::is_same_v<Type, double> ? node.value<Type>() : node.value_exact<Type>();
        if (value) *target = *value;
        return value.has_value();
      },
      slot);
}

std::string text_of(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  return out.str();
}

void set_value(RunConfig& config, const std::string& key, const toml::node& node, const std::string& where,
               Findings& findings) {
  const Field* field = find_field(key);
  if (!field) return findings.add(where, "unknown key", unknown_key_remedy(key));
  const Slot slot = field->slot(config);
  if (!assign(slot, node)) return findings.add(where, fmt::format("{} is no {}", text_of(node), type_name(slot)));
  const std::string broken = field->rule.broken_by(slot);
  if (!broken.empty()) findings.add(where, broken);
}

/// A key of the file, or a section that does not exist (then `node` is null).
struct Entry {
  std::string key;
  const toml::node* node;
  toml::source_index line;
};

void flatten(const toml::table& table, const std::string& prefix, std::vector<Entry>& out) {
  for (const auto& [key, node] : table) {
    const std::string full = prefix + std::string(key.str());
    const auto* inner = node.as_table();
    if (!inner) {
      out.push_back({full, &node, node.source().begin.line});
    } else if (prefix.empty() && !is_section(full)) {
      out.push_back({full, nullptr, node.source().begin.line});
    } else {
      flatten(*inner, full + ".", out);
    }
  }
}

std::string nearest_section(const std::string& name) {
  std::vector<std::string> sections;
  for (const Field& field : fields()) sections.push_back(field.key.substr(0, field.key.find('.')));
  return nearest(name, sections).front();
}

void read_entries(RunConfig& config, const toml::table& table, const std::string& name, Findings& findings) {
  std::vector<Entry> entries;
  flatten(table, "", entries);
  // toml++ sorts by name; people read from the top.
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.line < b.line; });
  for (const auto& [key, node, line] : entries) {
    if (node) {
      set_value(config, key, *node, fmt::format("{}:{} {}", name, line, key), findings);
    } else {
      findings.add(fmt::format("{}:{} [{}]", name, line, key), "unknown section",
                   fmt::format("did you mean [{}]?", nearest_section(key)));
    }
  }
}

std::string toml_text(const std::string& text) {
  std::ostringstream out;
  out << toml::value<std::string>(text);
  return out.str();
}

std::string value_text(const Slot& slot) {
  return std::visit(
      [](auto* value) -> std::string {
        using Type = std::remove_pointer_t<decltype(value)>;
        if constexpr (std::is_same_v<Type, std::string>) {
          return toml_text(*value);
        } else if constexpr (std::is_same_v<Type, double>) {
          return fmt::format("{}", *value);  // shortest text that reads back to the same number; "25.0" for whole ones
        } else {
          return fmt::format("{}", *value);
        }
      },
      slot);
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw ConfigError(fmt::format("{} is a folder, not a configuration (a run folder's is {}/config.toml)", path, path));
  if (!in) throw ConfigError(fmt::format("cannot read the configuration {} (does it exist?)", path));
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

RunConfig parse(const std::string& text, const std::string& name, Findings& findings) {
  RunConfig config;
  try {
    read_entries(config, toml::parse(text, name), name, findings);
  } catch (const toml::parse_error& error) {
    findings.add(fmt::format("{}:{}:{}", name, error.source().begin.line, error.source().begin.column),
                 fmt::format("not valid TOML: {}", error.description()));
  }
  return config;
}

void override_key(RunConfig& config, const std::string& assignment, Findings& findings) {
  const size_t equals = assignment.find('=');
  const std::string where = "--set " + assignment;
  if (equals == std::string::npos) return findings.add(where, "no '=' in it", "write --set section.key=value");
  const std::string key = assignment.substr(0, equals), text = assignment.substr(equals + 1);
  const Field* field = find_field(key);
  if (!field) return findings.add(where, "unknown key", unknown_key_remedy(key));
  const bool plain_text = std::holds_alternative<std::string*>(field->slot(config)) &&
                          (text.empty() || (text[0] != '"' && text[0] != '\''));
  try {
    set_value(config, key, *toml::parse("v = " + (plain_text ? toml_text(text) : text)).get("v"), where, findings);
  } catch (const toml::parse_error&) {
    findings.add(where, fmt::format("\"{}\" is no {}", text, type_name(field->slot(config))));
  }
}

std::vector<std::string> read_plan(const std::string& path) {
  const std::string text = read_text(path);
  Findings findings;
  std::istringstream lines(text);
  static constexpr const char* kMarker = "   (no key of weft train)";
  for (std::string line; std::getline(lines, line);)
    if (line.ends_with(kMarker)) findings.add(path, line.substr(2, line.size() - 2 - std::string(kMarker).size()) + " is not built into weft train", "plan with what it runs, for instance weft plan --pp 1 --cp 1 --no-offload");
  findings.throw_if_any("the plan");
  std::vector<std::string> assignments;
  try {
    for (const auto& [section, node] : toml::parse(text)) {
      if (!node.is_table()) throw ConfigError(fmt::format("{}: {} stands in no section; weft plan --out writes plans", path, section.str()));
      for (const auto& [key, value] : *node.as_table()) {
        std::ostringstream out;
        value.visit([&](const auto& v) { out << v; });
        assignments.push_back(fmt::format("{}.{}={}", section.str(), key.str(), out.str()));
      }
    }
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: {}", path, error.source().begin.line, error.description()));
  }
  return assignments;
}

RunConfig load(const std::string& path, const std::vector<std::string>& overrides) {
  Findings findings;
  RunConfig config = path.empty() ? RunConfig() : parse(read_text(path), path, findings);
  for (const std::string& assignment : overrides) override_key(config, assignment, findings);
  check(config, findings);
  findings.throw_if_any("configuration " + path);
  return config;
}

std::string to_toml(const RunConfig& config, bool with_help) {
  RunConfig copy = config;
  std::string out, section;
  for (const Field& field : fields()) {
    const size_t dot = field.key.find('.');
    if (field.key.substr(0, dot) != section) {
      if (!section.empty()) out += "\n";
      section = field.key.substr(0, dot);
      out += fmt::format("[{}]\n", section);
    }
    if (with_help) out += fmt::format("# {}\n", field.help);
    out += fmt::format("{} = {}\n", field.key.substr(dot + 1), value_text(field.slot(copy)));
  }
  return out;
}

}  // namespace weft::config
