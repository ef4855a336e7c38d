#include "weft/core/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace weft {
namespace {

std::string describe(const CommFailure& f) {
  std::string text = fmt::format("rank {}: {} #{} in group '{}' failed after {:.3f} s", f.rank, f.op, f.sequence, f.group,
                                 static_cast<double>(f.elapsed.count()) / 1e3);
  if (!f.cause.empty()) text += ": " + f.cause;
  if (!f.peers.empty()) text += fmt::format(" [rank{} at fault: {}]", f.peers.size() > 1 ? "s" : "", fmt::join(f.peers, ", "));
  return text;
}

}  // namespace

CommError::CommError(CommFailure failure) : Error(describe(failure)), failure_(std::move(failure)) {}

void Findings::add(std::string where, std::string what, std::string remedy) {
  items_.push_back({std::move(where), std::move(what), std::move(remedy)});
}

std::string Findings::text() const {
  std::string out;
  for (const Finding& f : items_) {
    out += f.where + ": " + f.what;
    if (!f.remedy.empty()) out += " (" + f.remedy + ")";
    out += '\n';
  }
  return out;
}

void Findings::throw_if_any(const std::string& subject) const {
  if (items_.empty()) return;
  std::string out = fmt::format("{}: {} problem{}", subject, items_.size(), items_.size() == 1 ? "" : "s");
  for (const Finding& f : items_) {
    out += "\n  " + f.where + ": " + f.what;
    if (!f.remedy.empty()) out += "\n    -> " + f.remedy;
  }
  throw ConfigError(out);
}

}  // namespace weft
