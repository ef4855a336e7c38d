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
Findings check_tensors(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers, bool rehearsal) {
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
      } else if (t.tensor.is_meta() && !rehearsal && !nn::start_values(t.tensor)) {
        findings.add(where, nn::kNoValues);
      } else if (c10::isFloat8Type(t.tensor.scalar_type()) && t.tensor.requires_grad()) {
        findings.add(where, fmt::format("is trainable in {}, in which gradients do not add up", c10::toString(t.tensor.scalar_type())),
                     "keep it in bf16 or fp32 and round it in forward, or freeze it");
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
  Findings findings = check_tensors(parameters, buffers, comm.is_rehearsal());
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

std::string moved_text(const std::string& name) {
  return "parameter '" + name + "' was given other storage after it was wrapped in DataParallel (by to(), set_data() or a load that "
         "replaces tensors). Move or load the module first, then wrap it";
}

std::string sparse_text(const std::string& name) {
  return "parameter '" + name + "' has a sparse gradient, which data parallelism does not reduce. Use sparse = false for this embedding";
}

std::string find_refrozen(const std::vector<NamedTensor>& trainable, const std::vector<NamedTensor>& frozen) {
  for (const NamedTensor& p : trainable) {
    if (p.tensor.requires_grad()) continue;
    return "parameter '" + p.name + "' was trainable when it was wrapped and is frozen now, which other ranks may not know. Freeze "
           "before wrapping, or wrap again";
  }
  for (const NamedTensor& p : frozen) {
    if (!p.tensor.requires_grad()) continue;
    return "parameter '" + p.name + "' was frozen when it was wrapped and requires a gradient now, which is not reduced. Unfreeze "
           "before wrapping, or wrap again";
  }
  return {};
}

void throw_step_fault(const StepFault& mine, uint64_t round, const Comm& comm) {
  constexpr char kThrew = 't', kRule = 'r';
  const std::string text = mine ? (mine.kind == StepFault::Kind::threw ? kThrew : kRule) + mine.text : std::string();
  const std::vector<std::string> all = comm.all_gather_text(text);
  if (mine.kind == StepFault::Kind::threw) return;
  std::vector<int> threw;
  std::string reasons;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::string& said = all[static_cast<size_t>(rank)];
    if (said.empty()) continue;
    if (said[0] == kRule) throw ConfigError(fmt::format("rank {}: {}", comm.world_rank(rank), said.substr(1)));
    threw.push_back(comm.world_rank(rank));
    if (said.size() > 1) reasons += fmt::format(". Rank {} found: {}", comm.world_rank(rank), said.substr(1));
  }
  throw CommError({.rank = comm.world_rank(comm.rank()),
                   .group = comm.name(),
                   .op = "backward",
                   .sequence = round,
                   .peers = threw,
                   .cause = "backward threw there, so the gradients of this step were dropped on every rank. A program that catches it on "
                            "all ranks may go on with the next step" + reasons});
}

}  // namespace weft::parallel
