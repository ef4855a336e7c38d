// Slurm's short forms of host lists and task counts.
#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "weft/core/error.h"
#include "weft/launch/environment.h"

namespace weft::launch {
namespace {

constexpr int64_t kMostNodes = 1 << 24;  // far above any cluster, far below overflow

[[noreturn]] void malformed(const std::string& list, const char* rule) {
  throw ConfigError(fmt::format("'{}' is not {}", list, rule));
}

/// Parts at commas outside brackets.
std::vector<std::string> split_outside_brackets(const std::string& list) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : list) {
    depth += c == '[';
    depth -= c == ']';
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

constexpr const char* kHostRule = "a Slurm host list such as n[1-4,7]";

/// Appends prefix + numbers of "1-3,07" (widths kept) + every expansion of `suffix`.
void expand_range(const std::string& list, const std::string& prefix, const std::string& ranges,
                  const std::string& suffix, std::vector<std::string>& out) {
  const std::vector<std::string> tails = suffix.empty() ? std::vector<std::string>{""} : expand_slurm_hosts(suffix);
  std::istringstream pieces(ranges);
  for (std::string piece; std::getline(pieces, piece, ',');) {
    const size_t dash = piece.find('-');
    const std::string first = piece.substr(0, dash), last = dash == std::string::npos ? first : piece.substr(dash + 1);
    int64_t low = 0, high = 0;
    const bool good =
        std::from_chars(first.data(), first.data() + first.size(), low).ptr == first.data() + first.size() &&
        !first.empty() &&
        std::from_chars(last.data(), last.data() + last.size(), high).ptr == last.data() + last.size() && !last.empty();
    if (!good || low > high || high - low > kMostNodes) malformed(list, kHostRule);
    for (int64_t number = low; number <= high; ++number) {
      for (const std::string& tail : tails)
        out.push_back(fmt::format("{}{:0{}}{}", prefix, number, first.size(), tail));
    }
  }
}

}  // namespace

std::vector<std::string> expand_slurm_hosts(const std::string& list) {
  std::vector<std::string> hosts;
  if (list.empty()) return hosts;
  for (const std::string& part : split_outside_brackets(list)) {
    const size_t open = part.find('['), close = part.find(']');
    if (part.empty() || (open == std::string::npos) != (close == std::string::npos)) malformed(list, kHostRule);
    if (open == std::string::npos) {
      hosts.push_back(part);
    } else if (close < open + 2) {
      malformed(list, kHostRule);
    } else {
      expand_range(list, part.substr(0, open), part.substr(open + 1, close - open - 1), part.substr(close + 1), hosts);
    }
  }
  return hosts;
}

std::vector<int> expand_slurm_counts(const std::string& list) {
  constexpr const char* kRule = "Slurm's list of tasks per node such as 2(x3),1";
  std::vector<int> counts;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int count = 0, times = 1;
    const char* const end = part.data() + part.size();
    const char* next = std::from_chars(part.data(), end, count).ptr;
    if (std::string_view(next, static_cast<size_t>(end - next)).starts_with("(x")) {
      const auto [stop, error] = std::from_chars(next + 2, end, times);
      if (error != std::errc() || stop == end || *stop != ')') malformed(list, kRule);
      next = stop + 1;
    }
    if (next != end || part.empty() || count < 1 || times < 1 || times > kMostNodes) malformed(list, kRule);
    counts.insert(counts.end(), static_cast<size_t>(times), count);
  }
  if (counts.empty()) malformed(list, kRule);
  return counts;
}

}  // namespace weft::launch
