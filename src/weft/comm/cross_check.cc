#include "weft/comm/cross_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "weft/comm/wire.h"

namespace weft::detail {
namespace {

constexpr int64_t kLineBytes = 256;  // a longer line is cut: it differs earlier, or the shapes are beyond any tensor's

// Straight to the back end: the comparison is not a call of its own in the log, the counts or the sequence.
at::Tensor gather_bytes(CommState& comm, const Call& call, at::Tensor mine) {
  at::Tensor all = at::empty({comm.size() * mine.numel()}, mine.options());
  c10d::AllgatherOptions options;
  options.timeout = comm.local ? comm.timeout : kBackgroundTimeout;
  try {
    wait_backend(comm, call, comm.backend->_allgather_base(all, mine, options));
  } catch (const CommError& e) {
    note_failure(comm, call, e.failure());
    throw;
  }
  return all;
}

[[noreturn]] void disagree(CommState& comm, const Call& call, int rank, const std::string& text) {
  const int culprit = comm.world_ranks[static_cast<size_t>(rank)];
  comm.core->transport->abort(culprit, text);
  throw_if_failed(comm, call);
  throw InternalError("an aborted world reports no failure");
}

}  // namespace

std::string describe_call(CommOp op, const at::Tensor* subject, const std::string& extra) {
  std::string line(name_of(op));
  if (!extra.empty()) line += "(" + extra + ")";
  if (subject) line += fmt::format(" of {} [{}]", c10::toString(subject->scalar_type()), fmt::join(subject->sizes(), ", "));
  return line;
}

void cross_check(CommState& comm, const Call& call, const std::string& line) {
  at::Tensor mine = at::zeros({kLineBytes}, at::kByte);
  std::memcpy(mine.data_ptr(), line.data(), std::min<size_t>(line.size(), kLineBytes - 1));
  const at::Tensor all = gather_bytes(comm, call, mine);
  const auto line_of = [&](int rank) { return std::string(static_cast<const char*>(all.data_ptr()) + rank * kLineBytes); };
  for (int rank = 1; rank < comm.size(); ++rank) {
    if (line_of(rank) == line_of(0)) continue;
    disagree(comm, call, rank,
             fmt::format("the ranks call different things as collective #{} of group '{}': rank {} calls {}, rank {} calls {}",
                         call.sequence, comm.name, comm.world_ranks[0], line_of(0),
                         comm.world_ranks[static_cast<size_t>(rank)], line_of(rank)));
  }
}

void cross_check_rows(CommState& comm, const Call& call, const std::vector<int64_t>& out_rows,
                      const std::vector<int64_t>& in_rows) {
  const int n = comm.size();
  std::vector<int64_t> mine(in_rows);
  mine.insert(mine.end(), out_rows.begin(), out_rows.end());
  const at::Tensor all = gather_bytes(comm, call, at::tensor(mine));  // [n, 2n]: rows sent, rows expected
  const auto* rows = all.const_data_ptr<int64_t>();
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      const int64_t sent = rows[from * 2 * n + to];
      const int64_t expected = rows[to * 2 * n + n + from];
      if (sent == expected) continue;
      disagree(comm, call, from,
               fmt::format("rows of all_to_all #{} in group '{}' do not match: rank {} sends {} rows to rank {}, which expects {}",
                           call.sequence, comm.name, comm.world_ranks[static_cast<size_t>(from)], sent,
                           comm.world_ranks[static_cast<size_t>(to)], expected));
    }
  }
}

}  // namespace weft::detail
