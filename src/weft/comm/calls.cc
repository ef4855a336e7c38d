#include "weft/comm/calls.h"

#include <fmt/format.h>

#include "weft/comm/cross_check.h"

namespace weft::detail {
namespace {

constexpr std::string_view kReduceNames[] = {"sum", "avg", "min", "max", "product"};

std::string extra_of(const Subject& subject) {
  if (subject.op == CommOp::all_reduce || subject.op == CommOp::reduce_scatter) {
    return std::string(kReduceNames[static_cast<size_t>(subject.reduce)]);
  }
  return subject.op == CommOp::broadcast ? fmt::format("root {}", subject.peer) : std::string();
}

}  // namespace

Call begin(CommState& comm, const Subject& subject) {
  auto& record = *comm.record;
  Call call{.op = subject.op, .start = std::chrono::steady_clock::now()};
  const bool message = is_message(subject.op);
  call.sequence = message ? record.messages : record.progress->started.load(std::memory_order_relaxed);
  throw_if_failed(comm, call);
  if (!record.dropped.empty()) finish_dropped(comm);
  call.ticket = comm.core->log.begin({.sequence = call.sequence,
                                      .numel = subject.tensor ? subject.tensor->numel() : 0,
                                      .group = record.log_group,
                                      .peer = subject.peer,
                                      .dtype = subject.tensor ? static_cast<int8_t>(subject.tensor->scalar_type()) : int8_t{-1},
                                      .op = subject.op},
                                     call.start);
  if (message) {
    ++record.messages;
  } else {
    record.progress->started.store(call.sequence + 1, std::memory_order_relaxed);  // only this rank's calls write it
  }
  auto& count = record.traffic[static_cast<size_t>(subject.op)];
  ++count.calls;
  count.bytes += subject.bytes;
  count.sent += subject.sent;
  if (comm.core->debug_level >= 2 && !message && comm.backend) {
    cross_check(comm, call, describe_call(subject.op, subject.tensor, extra_of(subject)));
  }
  return call;
}

Work finished(const CommState& comm, const Call& call) {
  comm.core->log.end(call.ticket, FlightLog::State::done);
  return {};
}

void rethrow_as_comm_error(CommState& comm, const Call& call) {
  try {
    throw;
  } catch (const CommError& e) {
    note_failure(comm, call, e.failure());
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    fail(comm, call, e.what());
  }
}

}  // namespace weft::detail
