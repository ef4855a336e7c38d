// What each call reads from where: the part of Lane that knows collectives. The queue is in lane.cc.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "weft/comm/local/lane.h"
#include "weft/comm/local/reduce.h"

namespace weft::local {
namespace {

/// Parts and chunks start at multiples of this: whole elements of every dtype, whole cache lines of peers.
constexpr size_t kGranule = 64;

void copy(char* to, const char* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

bool Lane::has_input(const Op& op) const {
  switch (op.call) {
    case Call::barrier: return false;
    case Call::broadcast: return me_ == op.root;
    case Call::message: return me_ == 0;
    default: return true;
  }
}

/// Whether this rank reads what `member` gives, and so waits for it.
bool Lane::needs(const Op& op, int member) const {
  switch (op.call) {
    case Call::broadcast: return me_ != op.root && member == op.root;
    case Call::message: return me_ == 1 && member == 0;
    case Call::reduce: return me_ == op.root;
    default: return true;
  }
}

bool Lane::pulls(const Op& op) const {
  switch (op.call) {
    case Call::broadcast: return me_ != op.root;
    case Call::message: return me_ == 1;
    case Call::reduce: return me_ == op.root;
    default: return true;
  }
}

/// The input has one part for each member, instead of one whole for all.
bool Lane::in_parts(const Op& op) const { return op.call == Call::reduce_scatter || op.call == Call::all_to_all; }

/// Bytes of a part that one staging round holds.
size_t Lane::chunk(const Op& op) const {
  return in_parts(op) ? layout_.slot_bytes / static_cast<size_t>(n_) / kGranule * kGranule : layout_.slot_bytes;
}

size_t Lane::part_bytes(const Op& op, int part) const {
  return op.call == Call::all_to_all ? op.send_bytes[static_cast<size_t>(part)] : op.bytes;
}

size_t Lane::input_bytes(const Op& op) const {
  if (!in_parts(op)) return op.bytes;
  size_t total = 0;
  for (int p = 0; p < n_; ++p) total += part_bytes(op, p);
  return total;
}

uint32_t Lane::rounds_if_staged(const Op& op) const {
  size_t longest = op.bytes;
  if (op.call == Call::all_to_all) longest = *std::max_element(op.send_bytes.begin(), op.send_bytes.end());
  return static_cast<uint32_t>((longest + chunk(op) - 1) / chunk(op));
}

/// Whether a member's input of the current round comes through its slots.
bool Lane::stages_round(const Op& op, int member) const {
  const Descriptor& d = descriptor(member, op.sequence);
  return d.source == Source::staged && d.rounds > op.round;
}

void Lane::choose_source(Op& op) const {
  if (!has_input(op) || n_ == 1) return;
  const size_t total = input_bytes(op);
  const size_t header = op.call == Call::all_to_all ? static_cast<size_t>(n_) * sizeof(uint64_t) : 0;
  if (header + total <= sizeof(Descriptor::payload)) {
    op.source = Source::carried;
  } else if (const SharedBlock* block = blocks_.find(op.input, total); block && (block->members & ranks_) == ranks_) {
    op.source = Source::shared;
  } else {
    op.source = Source::staged;
    op.my_rounds = rounds_if_staged(op);
  }
}

void Lane::describe_input(Op& op, Descriptor& d) {
  d.source = op.source;
  char* payload = d.payload;
  if (op.call == Call::all_to_all) {
    const size_t header = static_cast<size_t>(n_) * sizeof(uint64_t);
    std::memcpy(payload, op.send_bytes.data(), header);
    payload += header;
  }
  if (op.source == Source::carried) copy(payload, op.input, input_bytes(op));
  if (op.source == Source::shared) {
    const SharedBlock* block = blocks_.find(op.input, input_bytes(op));
    d.block = block->number;
    d.offset = static_cast<uint64_t>(op.input - block->base());
  }
}

/// The bytes of a part that belong to a round: all of them when no member stages.
Lane::Span Lane::round_span(const Op& op, uint32_t round, size_t part_bytes) const {
  if (op.rounds == 0) return {0, part_bytes};
  const size_t begin = std::min(part_bytes, round * chunk(op));
  return {begin, std::min(part_bytes - begin, chunk(op))};
}

/// All-reduce: the stretch of a round's `length` bytes that `member` reduces.
Lane::Span Lane::share(size_t length, int member) const {
  const size_t n = static_cast<size_t>(n_);
  const size_t each = ((length + n - 1) / n + kGranule - 1) / kGranule * kGranule;
  const size_t begin = std::min(length, each * static_cast<size_t>(member));
  return {begin, std::min(length - begin, each)};
}

void Lane::fill(Op& op, char* slot) const {
  const size_t stride = chunk(op);
  if (!in_parts(op)) {
    const size_t begin = std::min(op.bytes, op.next_fill * stride);
    const size_t length = std::min(op.bytes - begin, stride);
    if (op.call != Call::all_reduce) return copy(slot, op.input + begin, length);
    // Nobody reads this rank's own share from the slot before the result is there.
    const Span mine = share(length, me_);
    copy(slot, op.input + begin, mine.begin);
    const size_t after = mine.begin + mine.length;
    return copy(slot + after, op.input + begin + after, length - after);
  }
  const char* part = op.input;
  for (int p = 0; p < n_; ++p) {
    const size_t bytes = part_bytes(op, p);
    const size_t begin = std::min(bytes, op.next_fill * stride);
    if (p != me_) copy(slot + static_cast<size_t>(p) * stride, part + begin, std::min(bytes - begin, stride));
    part += bytes;
  }
}

/// All-to-all: where this rank's part starts in the input of the member that published `d`.
uint64_t Lane::part_offset(const Descriptor& d) const {
  std::array<uint64_t, kMaxRanks> bytes;
  std::memcpy(bytes.data(), d.payload, static_cast<size_t>(n_) * sizeof(uint64_t));
  return std::accumulate(bytes.begin(), bytes.begin() + me_, uint64_t{0});
}

/// Where a member's input of this round for this rank starts, in this rank's address space.
const char* Lane::locate(const Op& op, int member) const {
  const Descriptor& d = descriptor(member, op.sequence);
  if (d.source == Source::staged) {
    const char* start = slot(member, d.first_slot + op.round);
    return in_parts(op) ? start + static_cast<size_t>(me_) * chunk(op) : start;
  }
  size_t offset = op.rounds == 0 ? 0 : op.round * chunk(op);
  if (op.call == Call::reduce_scatter) offset += static_cast<size_t>(me_) * op.bytes;
  if (op.call == Call::all_to_all) offset += op.peer_offsets[static_cast<size_t>(member)];
  if (d.source == Source::shared) return blocks_.base(d.block) + d.offset + offset;
  return d.payload + (op.call == Call::all_to_all ? static_cast<size_t>(n_) * sizeof(uint64_t) : 0) + offset;
}

void Lane::reduce_all(Op& op, size_t length) const {
  std::array<const void*, kMaxRanks> sources;
  const Span span = round_span(op, op.round, op.bytes);
  const size_t own = (op.call == Call::reduce_scatter ? static_cast<size_t>(me_) * op.bytes : 0) + span.begin;
  for (int m = 0; m < n_; ++m) {
    const bool here = m == me_ && op.source != Source::carried;
    sources[static_cast<size_t>(m)] = here ? op.input + own : locate(op, m);
  }
  reduce(op.output + span.begin, sources.data(), n_, length / element_size(op.dtype), op.dtype, op.reduction);
}

void Lane::pull(Op& op) const {
  const Span span = round_span(op, op.round, op.bytes);
  switch (op.call) {
    case Call::barrier: return;
    case Call::all_reduce:
    case Call::reduce:
    case Call::reduce_scatter: return reduce_all(op, span.length);
    case Call::broadcast: return copy(op.output + span.begin, locate(op, op.root), span.length);
    case Call::message: return copy(op.output + span.begin, locate(op, 0), span.length);
    case Call::all_gather:
      for (int i = 0; i < n_; ++i) {
        const int m = (me_ + i) % n_;  // each rank starts with its own: peers are read by one rank at a time
        const char* from = m == me_ ? op.input + span.begin : locate(op, m);
        copy(op.output + static_cast<size_t>(m) * op.bytes + span.begin, from, span.length);
      }
      return;
    case Call::all_to_all: {
      char* to = op.output;
      const char* own = op.input;
      for (int m = 0; m < me_; ++m) own += op.send_bytes[static_cast<size_t>(m)];
      for (int m = 0; m < n_; ++m) {
        const size_t bytes = op.receive_bytes[static_cast<size_t>(m)];
        const Span part = round_span(op, op.round, bytes);
        if (part.length > 0) copy(to + part.begin, m == me_ ? own + part.begin : locate(op, m), part.length);
        to += bytes;
      }
      return;
    }
  }
}

// The result goes where the peers look for it: in place in a shared block, else into this rank's slot.
void Lane::reduce_own_part(Op& op) const {
  const Span span = round_span(op, op.round, op.bytes);
  const Span mine = share(span.length, me_);
  if (mine.length == 0) return;
  char* here = op.output + span.begin + mine.begin;
  std::array<const void*, kMaxRanks> sources;
  for (int m = 0; m < n_; ++m) sources[static_cast<size_t>(m)] = m == me_ ? here : locate(op, m) + mine.begin;
  reduce(here, sources.data(), n_, mine.length / element_size(op.dtype), op.dtype, op.reduction);
  if (op.source == Source::staged) {
    copy(slot(me_, descriptor(me_, op.sequence).first_slot + op.round) + mine.begin, here, mine.length);
  }
}

void Lane::copy_results(Op& op) const {
  const Span span = round_span(op, op.round, op.bytes);
  for (int i = 1; i < n_; ++i) {
    const int m = (me_ + i) % n_;
    const Span theirs = share(span.length, m);
    copy(op.output + span.begin + theirs.begin, locate(op, m) + theirs.begin, theirs.length);
  }
}

}  // namespace weft::local
