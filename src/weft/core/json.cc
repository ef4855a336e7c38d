#include "weft/core/json.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "weft/core/error.h"
#include "weft/core/nearest.h"

namespace weft {

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw ConfigError(fmt::format("{}: cannot be opened: {}", path.string(), std::strerror(errno)));
  std::ostringstream text;
  text << in.rdbuf();
  if (in.bad()) throw ConfigError(fmt::format("{}: cannot be read: {}", path.string(), std::strerror(errno)));
  return std::move(text).str();
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path temporary = path.string() + fmt::format(".tmp{}", ::getpid());
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  if (!out) {
    const std::string reason = std::strerror(errno);
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw ConfigError(fmt::format("{}: cannot be written: {}", path.string(), reason));
  }
  std::filesystem::rename(temporary, path);
}

Json parse_json(std::string_view text, const std::string& source) {
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    // The byte is where the parser stopped, one behind the offending character.
    const std::string_view before = text.substr(0, std::min(text.size(), error.byte == 0 ? 0 : error.byte - 1));
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    throw ConfigError(
        fmt::format("{}:{}:{}: not valid JSON: {}", source, line, before.size() - start + 1, error.what()));
  }
}

Json read_json(const std::filesystem::path& path) {
  return parse_json(read_text(path), path.string());
}

namespace detail {

const Json& json_at(const Json& object, const std::string& key, const std::string& source) {
  if (!object.is_object())
    throw ConfigError(fmt::format("{}: '{}' asked of a {}; an object is needed", source, key, object.type_name()));
  if (const auto found = object.find(key); found != object.end()) return *found;
  std::vector<std::string> keys;
  for (const auto& item : object.items()) keys.push_back(item.key());
  const std::string hint = did_you_mean(key, keys);
  throw ConfigError(fmt::format("{}: key '{}' is missing{}", source, key, hint.empty() ? "" : " (" + hint + ")"));
}

void json_type_error(const Json& value, const std::string& key, const std::string& source, const char* what) {
  constexpr size_t kShown = 60;
  std::string shown = value.dump();
  if (shown.size() > kShown) shown = shown.substr(0, kShown) + "...";
  throw ConfigError(fmt::format("{}: key '{}' = {} has the wrong type: {}", source, key, shown, what));
}

}  // namespace detail
}  // namespace weft
