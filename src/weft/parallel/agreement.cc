#include "weft/parallel/agreement.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "weft/core/error.h"
#include "weft/nn/start_values.h"
#include "weft/parallel/option_check.h"

namespace weft::parallel {
namespace {

std::string describe(const char* kind, const NamedTensor& t) {
  const auto deferred = nn::start_values(t.tensor);
  return fmt::format("{} '{}' [{}] {}{}{}", kind, t.name, fmt::join(t.tensor.sizes(), ", "), c10::toString(t.tensor.scalar_type()),
                     t.tensor.requires_grad() ? "" : " frozen", deferred ? " deferred: " + deferred->describe() : "");
}

/// Starts the text of a rank whose tensors cannot be wrapped; all ranks then throw.
constexpr char kUnfit = '!';

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Bytes that a tensor's elements span.
std::pair<const char*, const char*> span_of(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

/// Tensors that share memory would be torn apart: each gets a place of its own.
void find_shared_memory(const std::vector<NamedTensor>& parameters, Findings& findings) {
  std::vector<std::pair<std::pair<const char*, const char*>, const NamedTensor*>> spans;
  for (const NamedTensor& p : parameters) {
    if (p.tensor.numel() > 0 && !p.tensor.is_meta()) spans.emplace_back(span_of(p.tensor), &p);
  }
  std::ranges::sort(spans);
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first.first >= spans[i - 1].first.second) continue;
    findings.add("parameter '" + spans[i].second->name + "'",
                 "shares memory with '" + spans[i - 1].second->name + "' but is another tensor",
                 "tie weights by registering one tensor in both places");
  }
}

/// Everything that keeps these tensors from being wrapped.
Findings check_tensors(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers) {
  Findings findings;
  std::set<std::string> names;
  for (const std::vector<NamedTensor>* list : {&parameters, &buffers}) {
    for (const NamedTensor& t : *list) {
      const std::string where = (list == &parameters ? "parameter '" : "buffer '") + t.name + "'";
      if (!names.insert(t.name).second) findings.add(where, "is listed twice", "names identify tensors; give each its own");
      if (!t.tensor.defined()) {
        findings.add(where, "is undefined", "leave it out");
      } else if (t.tensor.layout() != at::kStrided) {
        findings.add(where, "is sparse", "data parallelism takes dense tensors");
      } else if (t.tensor.is_meta() && !nn::start_values(t.tensor)) {
        findings.add(where, nn::kNoValues);
      } else if (!t.tensor.is_leaf()) {
        findings.add(where, "is the result of a computation", "wrap the leaf that it is computed from");
      }
    }
  }
  if (findings.empty()) find_shared_memory(parameters, findings);
  return findings;
}

}  // namespace

void check_same_model(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                      const DataParallelOptions& options, const Comm& comm) {
  Findings findings = check_tensors(parameters, buffers);
  check_options(options, comm.size(), findings);
  if (comm.size() == 1) return findings.throw_if_any("DataParallel");
  std::string mine;
  if (!findings.empty()) {
    mine = kUnfit + findings.text();
  } else {
    mine = describe(options) + '\n';
    for (const NamedTensor& p : parameters) mine += describe("parameter", p) + '\n';
    for (const NamedTensor& b : buffers) mine += describe("buffer", b) + '\n';
  }
  const std::vector<std::string> all = comm.all_gather_text(mine);
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (all[rank].starts_with(kUnfit)) {
      throw ConfigError(fmt::format("DataParallel cannot wrap what rank {} has:\n{}", comm.world_rank(rank), all[rank].substr(1)));
    }
  }
  const std::vector<std::string> reference = lines_of(all[0]);
  for (int rank = 1; rank < comm.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::vector<std::string> other = lines_of(all[rank]);
    size_t i = 0;
    while (i < reference.size() && i < other.size() && reference[i] == other[i]) ++i;
    const auto item = [i](const std::vector<std::string>& lines) { return i < lines.size() ? lines[i] : "nothing more"; };
    throw ConfigError(fmt::format("ranks wrapped different {}: entry {} is {} on rank {} and {} on rank {}. Build the same "
                                  "model (same configuration, same order) with the same options on every rank",
                                  i == 0 ? "options" : "models", i, item(reference), comm.world_rank(0), item(other), comm.world_rank(rank)));
  }
}

}  // namespace weft::parallel
