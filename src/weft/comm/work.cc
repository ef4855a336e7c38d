#include "weft/comm/work.h"

#include <fmt/format.h>

#include <thread>

#include "weft/comm/local/engine.h"
#include "weft/comm/local/local.h"
#include "weft/comm/state.h"
#include "weft/core/cause.h"

namespace weft {
namespace detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

// Yields first: on a loaded machine the peer needs this core. Then sleeps, up to a tenth of the shortest sensible call.
class Backoff {
 public:
  void pause() {
    if (turns_++ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(sleep_);
      sleep_ = std::min(sleep_ * 2, std::chrono::microseconds(1000));
    }
  }

 private:
  static constexpr int kYields = 100;
  int turns_ = 0;
  std::chrono::microseconds sleep_{20};
};

std::string deadline_text(milliseconds timeout) {
  return fmt::format("the deadline of {:g} s passed", static_cast<double>(timeout.count()) / 1e3);
}

}  // namespace

void wait_backend(CommState& comm, const Call& call, const c10::intrusive_ptr<c10d::Work>& work) {
  if (comm.local) {
    work->wait();
    return;
  }
  const auto entered = Clock::now();
  std::string error;
  try {
    // Messages of gloo are waited for by gloo itself (StoreTransport ends the wait when the world fails), and so is
    // anything of a back end that is not ours.
    if (is_message(call.op) || !comm.core->transport->spreads_failures()) {
      work->wait(comm.timeout);
      return;
    }
    Backoff backoff;
    while (!work->isCompleted()) {
      throw_if_failed(comm, call);
      if (since(entered) > comm.timeout) fail(comm, call, deadline_text(comm.timeout));
      backoff.pause();
    }
    work->wait();
    return;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    error = e.what();
  }
  if (since(entered) >= comm.timeout) error = deadline_text(comm.timeout);
  fail(comm, call, error);
}

void note_failure(CommState& comm, const Call& call, const CommFailure& failure) {
  comm.core->log.end(call.ticket, FlightLog::State::failed);
  comm.core->log.set_failure(failure.cause);
  const bool first = !comm.record->failure;
  comm.record->failure = failure;
  if (first) comm.core->log.dump_on_failure();
}

void fail(CommState& comm, const Call& call, const std::string& symptom) {
  const Cause cause = comm.core->transport->diagnose(comm.world_ranks, *comm.record->progress, call.sequence, cause_line(symptom));
  CommFailure failure{.rank = comm.core->rank,
                      .group = comm.name,
                      .op = std::string(name_of(call.op)),
                      .sequence = call.sequence,
                      .peers = cause.culprits,
                      .elapsed = since(call.start),
                      .cause = cause.reason};
  note_failure(comm, call, failure);
  // Ends what is still in flight, so that neither a destructor nor another thread waits for a peer that will not come.
  if (comm.backend && !comm.local) comm.backend->abort();
  throw CommError(std::move(failure));
}

void throw_if_failed(CommState& comm, const Call& call) {
  if (comm.record->failure) {
    CommFailure failure = *comm.record->failure;
    failure.op = name_of(call.op);
    failure.sequence = call.sequence;
    failure.elapsed = since(call.start);
    throw CommError(std::move(failure));
  }
  if (const auto cause = comm.core->transport->failure()) fail(comm, call, cause->reason);
}

void finish_dropped(CommState& comm) {
  auto& dropped = comm.record->dropped;
  for (auto it = dropped.begin(); it != dropped.end();) {
    if (!it->work->isCompleted()) {
      ++it;
      continue;
    }
    Flight flight = std::move(*it);
    it = dropped.erase(it);
    wait_backend(comm, flight.call, flight.work);
    if (flight.finish) flight.finish();
    comm.core->log.end(flight.call.ticket, FlightLog::State::done);
  }
}

WorkState::~WorkState() {
  // The local back end itself keeps a dropped call alive; for others the group does.
  if (!done_ && !comm_->local && !comm_->record->failure) comm_->record->dropped.push_back(std::move(flight_));
}

void WorkState::complete() {
  if (flight_.finish) flight_.finish();
  comm_->core->log.end(flight_.call.ticket, FlightLog::State::done);
  done_ = true;
  if (!comm_->local) flight_ = {};
}

bool WorkState::run_local(Way way, bool release) {
  const auto until = release ? local::Until::released : local::Until::complete;
  try {
    if (way == Way::wait) {
      comm_->local->wait(*flight_.op, until);
    } else if (!(way == Way::poll ? comm_->local->test(*flight_.op, until) : comm_->local->wait_unless_needed(*flight_.op))) {
      return false;
    }
  } catch (const CommError& e) {
    note_failure(*comm_, flight_.call, e.failure());
    throw;
  }
  if (!done_) complete();
  released_ = released_ || release;
  return true;
}

bool WorkState::test() {
  if (done_) return true;
  if (comm_->local) return run_local(Way::poll, false);
  throw_if_failed(*comm_, flight_.call);
  if (!flight_.work->isCompleted()) return false;
  wait();
  return true;
}

void WorkState::wait() {
  if (done_) return;
  if (comm_->local) {
    run_local(Way::wait, false);
    return;
  }
  wait_backend(*comm_, flight_.call, flight_.work);
  complete();
}

void WorkState::released() {
  if (comm_->local && !released_) {
    run_local(Way::wait, true);
  } else {
    wait();
  }
}

bool WorkState::wait_unless_needed() {
  if (done_) return true;
  return comm_->local ? run_local(Way::wait_unless_needed, false) : test();
}

}  // namespace detail

bool Work::test() { return !state_ || state_->test(); }

void Work::wait() {
  if (state_) state_->wait();
}

void Work::released() {
  if (state_) state_->released();
}

bool Work::wait_unless_needed() { return !state_ || state_->wait_unless_needed(); }

}  // namespace weft
