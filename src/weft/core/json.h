// JSON as Weft reads and writes it: keys keep their order, errors are ConfigErrors that name the file and the place.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace weft {

using Json = nlohmann::ordered_json;

/// The whole file. ConfigError when it cannot be read.
std::string read_text(const std::filesystem::path& path);
/// Writes beside `path` and renames, so that a reader sees the old or the new file and never half of one.
void write_text(const std::filesystem::path& path, std::string_view text);

/// `source` names the text in errors (file name, option). ConfigError with line and column when it is not JSON.
Json parse_json(std::string_view text, const std::string& source);
Json read_json(const std::filesystem::path& path);

/// The value at `key`; ConfigError naming source, key and the nearest present key when absent or of another type.
template <typename T>
T json_field(const Json& object, const std::string& key, const std::string& source);

/// As json_field, `fallback` when absent; a value of another type is still an error.
template <typename T>
T json_field_or(const Json& object, const std::string& key, T fallback, const std::string& source) {
  return object.contains(key) ? json_field<T>(object, key, source) : fallback;
}

namespace detail {
const Json& json_at(const Json& object, const std::string& key, const std::string& source);
[[noreturn]] void json_type_error(const Json& value, const std::string& key, const std::string& source,
                                  const char* what);
}  // namespace detail

template <typename T>
T json_field(const Json& object, const std::string& key, const std::string& source) {
  const Json& value = detail::json_at(object, key, source);
  try {
    return value.get<T>();
  } catch (const nlohmann::json::exception& error) {
    detail::json_type_error(value, key, source, error.what());
  }
}

}  // namespace weft
