#include "weft/parallel/agreement.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

#include "weft/core/error.h"

namespace weft::parallel {
namespace {

std::string describe(const char* kind, const NamedTensor& t) {
  return fmt::format("{} '{}' [{}] {}{}", kind, t.name, fmt::join(t.tensor.sizes(), ", "),
                     c10::toString(t.tensor.scalar_type()), t.tensor.requires_grad() ? "" : " frozen");
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void check_same_model(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers, const Comm& comm) {
  if (comm.size() == 1) return;
  std::string mine;
  for (const NamedTensor& p : parameters) mine += describe("parameter", p) + '\n';
  for (const NamedTensor& b : buffers) mine += describe("buffer", b) + '\n';
  const std::vector<std::string> all = comm.all_gather_text(mine);
  const std::vector<std::string> reference = lines_of(all[0]);
  for (int rank = 1; rank < comm.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::vector<std::string> other = lines_of(all[rank]);
    size_t i = 0;
    while (i < reference.size() && i < other.size() && reference[i] == other[i]) ++i;
    const auto item = [i](const std::vector<std::string>& lines) { return i < lines.size() ? lines[i] : "nothing more"; };
    throw ConfigError(fmt::format("ranks built different models: entry {} is {} on rank {} and {} on rank {}. Build the same "
                                  "model (same configuration, same order) on every rank",
                                  i, item(reference), comm.world_rank(0), item(other), comm.world_rank(rank)));
  }
}

}  // namespace weft::parallel
