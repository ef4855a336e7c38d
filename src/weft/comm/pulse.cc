#include "weft/comm/pulse.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "weft/comm/failure_look.h"
#include "weft/comm/pipe_signal.h"
#include "weft/comm/process_state.h"
#include "weft/core/cause.h"
#include "weft/core/error.h"

namespace weft::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kBeat = kFailureLook;
// A rank without a new beat for this long is taken for dead or stopped. Its thread needs a core only a few times a second.
constexpr milliseconds kSilence{900};
// How long a caller waits for the store before it takes the store's host for dead.
constexpr milliseconds kStorePatience{1500};
constexpr milliseconds kFarewell{1000};
constexpr const char* kFailureKey = "failure";

std::string beat_key(int rank) { return fmt::format("beat/{}", rank); }
std::string done_key(int rank) { return fmt::format("done/{}", rank); }

std::string to_text(const Cause& cause) {
  return nlohmann::json({{"culprits", cause.culprits}, {"reason", cause.reason}}).dump();
}

Cause to_cause(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  return {json.at("culprits").get<std::vector<int>>(), json.at("reason").get<std::string>()};
}

// "rank 2" or "ranks 1, 2"
std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "));
}

struct Beat {
  uint64_t number = 0;
  std::string process;
  bool done = false;
  std::map<std::string, uint64_t> started;  // by group
};

struct Question {
  std::vector<int> world_ranks;
  std::string group;
  uint64_t sequence = 0;
  std::string symptom;
  std::optional<std::map<int, Beat>> before;
  Clock::time_point asked;
  std::optional<Cause> answer;
};

}  // namespace

struct Pulse::State {
  State(c10::intrusive_ptr<c10d::Store> store_in, int rank_in, int size_in, int host_in)
      : store(std::move(store_in)), rank(rank_in), size(size_in), host(host_in) {}

  void run();
  void turn();
  void beat();
  void look_for_failure();
  void publish(const Cause& cause);
  void consider(Question& question);
  std::map<int, Beat> read_beats(const std::vector<int>& ranks);
  void farewell();
  void lost(const std::string& why);
  void set_failure(Cause cause);
  void end_groups();

  const c10::intrusive_ptr<c10d::Store> store;  // used by the thread only
  const int rank;
  const int size;
  const int host;
  uint64_t beats = 0;
  bool host_done = false;

  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<Progress>> watched;
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> groups;
  std::optional<Cause> failure;    // the world's first one, once `failed`
  std::optional<Cause> to_publish;
  std::shared_ptr<Question> question;
  bool store_lost = false;
  bool stopping = false;
  bool ended = false;
};

void Pulse::State::set_failure(Cause cause) {
  {
    std::lock_guard lock(mutex);
    if (!failure) failure = std::move(cause);
    failed.store(true, std::memory_order_release);
  }
  changed.notify_all();
}

void Pulse::State::beat() {
  nlohmann::json groups = nlohmann::json::object();
  {
    std::lock_guard lock(mutex);
    std::erase_if(watched, [](const auto& weak) { return weak.expired(); });
    for (const auto& weak : watched) {
      if (const auto progress = weak.lock()) groups[progress->group] = progress->started.load(std::memory_order_relaxed);
    }
  }
  store->set(beat_key(rank), nlohmann::json({{"n", ++beats}, {"process", this_process()}, {"groups", std::move(groups)}}).dump());
}

void Pulse::State::look_for_failure() {
  if (!failed.load(std::memory_order_relaxed) && store->check({kFailureKey})) set_failure(to_cause(store->get_to_str(kFailureKey)));
  if (host >= 0 && host != rank && !host_done) host_done = store->check({done_key(host)});
}

void Pulse::State::publish(const Cause& cause) {
  // compareSet with an empty expectation sets a missing key and returns what is stored then.
  set_failure(to_cause(store->compareSet(kFailureKey, std::string(), to_text(cause))));
}

std::map<int, Beat> Pulse::State::read_beats(const std::vector<int>& ranks) {
  std::map<int, Beat> result;
  for (const int r : ranks) {
    Beat read;
    if (store->check({beat_key(r)})) {
      const auto json = nlohmann::json::parse(store->get_to_str(beat_key(r)));
      read.number = json.at("n").get<uint64_t>();
      read.process = json.at("process").get<std::string>();
      read.started = json.at("groups").get<std::map<std::string, uint64_t>>();
    }
    read.done = store->check({done_key(r)});
    result.emplace(r, std::move(read));
  }
  return result;
}

// Two looks, kSilence apart. A failure that somebody else published in between is the answer instead.
void Pulse::State::consider(Question& q) {
  if (!q.before) {
    q.before = read_beats(q.world_ranks);
    q.asked = Clock::now();
  }
  // On this host the system tells at once.
  std::vector<int> dead;
  for (const auto& [r, last] : *q.before) {
    if (r != rank && !last.done && process_ended_or_stopped(last.process)) dead.push_back(r);
  }
  if (dead.empty() && Clock::now() - q.asked < kSilence) return;
  const auto now = read_beats(dead.empty() ? q.world_ranks : std::vector<int>{});
  std::vector<int> silent = std::move(dead), gone, behind;
  for (const auto& [r, last] : now) {
    if (r == rank) continue;
    const auto started = last.started.find(q.group);
    const bool arrived = started != last.started.end() && started->second > q.sequence;
    if (last.done) {
      if (!arrived) gone.push_back(r);
    } else if (last.number == q.before->at(r).number) {
      silent.push_back(r);
    } else if (!arrived) {
      behind.push_back(r);
    }
  }
  Cause cause{{}, q.symptom};
  if (!silent.empty()) {
    cause = {silent, fmt::format("{} exited, {} killed or {} stopped (no sign of life; {})", ranks_text(silent),
                                 silent.size() > 1 ? "were" : "was", silent.size() > 1 ? "are" : "is", q.symptom)};
  } else if (!gone.empty()) {
    cause = {gone, fmt::format("{} left the world before this call ({})", ranks_text(gone), q.symptom)};
  } else if (!behind.empty()) {
    cause = {behind, fmt::format("{} never arrived ({})", ranks_text(behind), q.symptom)};
  }
  publish(cause);
  std::lock_guard lock(mutex);
  q.answer = failure;
}

void Pulse::State::end_groups() {
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> ending;
  {
    std::lock_guard lock(mutex);
    if (!failure) return;
    ending.swap(groups);
  }
  for (const auto& weak : ending) {
    if (const auto group = weak.lock()) group->abort();
  }
}

void Pulse::State::turn() {
  beat();
  look_for_failure();
  end_groups();
  std::optional<Cause> cause;
  std::shared_ptr<Question> asked;
  {
    std::lock_guard lock(mutex);
    cause = std::move(to_publish);
    to_publish.reset();
    asked = failure ? nullptr : question;
  }
  if (cause) publish(*cause);
  if (asked) consider(*asked);
}

void Pulse::State::lost(const std::string& why) {
  {
    std::lock_guard lock(mutex);
    store_lost = true;
  }
  // A host that said goodbye has taken the store with it; whoever still needs that rank fails by its connections.
  if (host >= 0 && !host_done) {
    set_failure({{host}, fmt::format("rank {}, whose process serves the store, exited or was killed ({})", host, why)});
  }
  changed.notify_all();
}

void Pulse::State::farewell() {
  store->set(done_key(rank), "1");
  if (rank != host) return;
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(done_key(r));
  const auto until = Clock::now() + kFarewell;
  while (!store->check(keys) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
}

void Pulse::State::run() {
  try {
    std::unique_lock lock(mutex);
    while (!stopping) {
      lock.unlock();
      turn();
      lock.lock();
      const auto urgent = [&] { return stopping || to_publish || (question && !question->before && !failure); };
      // While somebody waits for an answer the thread looks more often than it beats by itself.
      changed.wait_for(lock, question ? kBeat / 2 : kBeat, urgent);
    }
    lock.unlock();
    farewell();
  } catch (const std::exception& e) {
    lost(cause_line(e.what()));
    end_groups();
  }
  std::lock_guard lock(mutex);
  ended = true;
  changed.notify_all();
}

Pulse::Pulse(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int host)
    : state_(std::make_shared<State>(std::move(store), rank, size, host)) {
  const PipeSignalBlocked for_the_thread;
  std::thread([state = state_] { state->run(); }).detach();
}

Pulse::~Pulse() {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kFarewell + kStorePatience, [&] { return state_->ended; });
}

void Pulse::watch(const std::shared_ptr<Progress>& progress) {
  std::lock_guard lock(state_->mutex);
  state_->watched.push_back(progress);
}

void Pulse::end_with_world(const c10::intrusive_ptr<c10d::Backend>& group) {
  std::lock_guard lock(state_->mutex);
  std::erase_if(state_->groups, [](const auto& weak) { return weak.expired(); });
  state_->groups.emplace_back(group);
}

std::optional<Cause> Pulse::failure() const {
  if (!state_->failed.load(std::memory_order_acquire)) return std::nullopt;
  std::lock_guard lock(state_->mutex);
  return state_->failure;
}

Cause Pulse::fail(Cause cause) {
  std::unique_lock lock(state_->mutex);
  if (state_->failure) return *state_->failure;
  if (!state_->store_lost) {
    state_->to_publish = cause;
    state_->changed.notify_all();
    state_->changed.wait_for(lock, kStorePatience, [&] { return state_->failure || state_->store_lost; });
  }
  if (!state_->failure) state_->failure = std::move(cause);
  state_->failed.store(true, std::memory_order_release);
  return *state_->failure;
}

Cause Pulse::blame(const std::vector<int>& world_ranks, const Progress& progress, uint64_t sequence,
                   const std::string& symptom) {
  std::unique_lock lock(state_->mutex);
  if (state_->failure) return *state_->failure;
  auto question = std::make_shared<Question>();
  question->world_ranks = world_ranks;
  question->group = progress.group;
  question->sequence = sequence;
  question->symptom = symptom;
  if (!state_->store_lost) {
    state_->question = question;
    state_->changed.notify_all();
    state_->changed.wait_for(lock, kSilence + kStorePatience,
                             [&] { return question->answer || state_->failure || state_->store_lost; });
    state_->question = nullptr;
  }
  if (!state_->failure) {
    // The store does not answer. Its host is at fault, if it is one of us.
    Cause cause{{}, symptom};
    if (state_->host >= 0 && state_->host != state_->rank) {
      cause = {{state_->host}, fmt::format("rank {}, whose process serves the store, does not answer: it exited, was killed or "
                                           "is stopped ({})", state_->host, symptom)};
    }
    state_->failure = std::move(cause);
    state_->failed.store(true, std::memory_order_release);
  }
  return *state_->failure;
}

}  // namespace weft::detail
