// What this process may use of the machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace weft {

/// Cores that this process may run on (its affinity mask, not the machine's count); at least 1.
int64_t usable_cores();

/// The value behind "key : value" or "key value" of a file of /proc; empty when the file or the key is absent.
std::string value_behind(const std::filesystem::path& file, const std::string& key);

}  // namespace weft
