#include "weft/comm/comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "weft/comm/local/local.h"
#include "weft/comm/single_transport.h"
#include "weft/comm/state.h"
#include "weft/memory/account.h"

namespace weft {

using detail::CommOp;
using detail::CommState;

Comm::Comm() : state_(std::make_shared<CommState>()) {}

int Comm::rank() const { return state_->rank; }
int Comm::size() const { return state_->size(); }
const std::string& Comm::name() const { return state_->name; }

int Comm::world_rank(int rank) const {
  if (rank < 0 || rank >= size()) {
    throw ConfigError(fmt::format("rank {} is not a rank of group '{}' (0 .. {})", rank, name(), size() - 1));
  }
  return state_->world_ranks[static_cast<size_t>(rank)];
}

std::vector<std::string> Comm::all_gather_text(const std::string& mine) const {
  const int n = size();
  at::Tensor lengths = at::empty({n}, at::kLong);
  at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  all_gather(lengths, length).wait();
  const auto* bytes = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(bytes, bytes + n);
  at::Tensor padded = at::zeros({longest}, at::kByte);
  if (!mine.empty()) std::memcpy(padded.data_ptr(), mine.data(), mine.size());
  at::Tensor all = at::empty({n, longest}, at::kByte);
  all_gather(all, padded).wait();
  std::vector<std::string> texts;
  for (int r = 0; r < n; ++r) {
    texts.emplace_back(static_cast<const char*>(all.const_data_ptr()) + r * longest, static_cast<size_t>(bytes[r]));
  }
  return texts;
}

bool Comm::is_rehearsal() const {
  return state_->core && dynamic_cast<const detail::FakeTransport*>(state_->core->transport.get()) != nullptr;
}

at::Tensor Comm::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) const {
  if (state_->local) return state_->local->allocate(sizes, c10::typeMetaToScalarType(options.dtype()));
  const auto scope = memory::current_category();
  const memory::Scope category(scope == memory::Category::other ? memory::Category::communication : scope);
  return at::empty(sizes, options);
}

Comm Comm::split(int color, int key, const std::string& name) const {
  const int n = size();
  if (n == 1) return *this;
  if (!state_->backend) {
    throw ConfigError(fmt::format("split of group '{}': a rehearsal has no peers that say their colours; pass the function that "
                                  "gives every rank's place", this->name()));
  }
  at::Tensor mine = at::zeros({2}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = color;
  mine.mutable_data_ptr<int64_t>()[1] = key;
  at::Tensor all = at::empty({n, 2}, at::kLong);
  all_gather(all, mine).wait();
  const auto* entries = all.const_data_ptr<int64_t>();
  return split([&](int r) { return SplitPlace{static_cast<int>(entries[2 * r]), static_cast<int>(entries[2 * r + 1])}; }, name);
}

Comm Comm::split(const std::function<SplitPlace(int)>& place, const std::string& name) const {
  if (size() == 1) return *this;
  std::vector<std::pair<int, int>> keyed;  // key, rank
  const int color = place(rank()).color;
  for (int r = 0; r < size(); ++r) {
    const SplitPlace its = place(r);
    if (color >= 0 && its.color == color) keyed.emplace_back(its.key, r);
  }
  std::sort(keyed.begin(), keyed.end());
  std::vector<int> members;
  for (const auto& [key, r] : keyed) members.push_back(world_rank(r));
  if (members.empty()) members = {world_rank(rank())};
  return Comm(detail::make_group(state_->core, members, name, state_->timeout));
}

Comm Comm::with_timeout(std::chrono::milliseconds timeout) const {
  if (timeout.count() <= 0) throw ConfigError(fmt::format("a deadline of {} ms is not positive", timeout.count()));
  auto copy = std::make_shared<CommState>(*state_);
  copy->timeout = timeout;
  return Comm(std::move(copy));
}

std::map<std::string, TrafficCount> Comm::traffic() const {
  std::map<std::string, TrafficCount> counts;
  if (!state_->record) return counts;
  for (size_t op = 0; op < detail::kCommOps; ++op) {
    const auto& count = state_->record->traffic[op];
    if (count.calls > 0) counts.emplace(detail::name_of(static_cast<CommOp>(op)), count);
  }
  return counts;
}

std::string Comm::flight_log() const { return state_->core ? state_->core->log.json() : "{}"; }

void Comm::abort(const std::string& reason) const {
  if (state_->core && state_->core->transport) state_->core->transport->abort(state_->core->rank, reason);
}

void Comm::progress() const {
  if (state_->local) {
    state_->local->progress();
  } else if (state_->record) {
    detail::finish_dropped(*state_);
    detail::throw_if_failed(*state_, {.op = CommOp::barrier, .sequence = state_->record->progress->started,
                                      .start = std::chrono::steady_clock::now()});
  }
}

}  // namespace weft
