#include "weft/comm/local/lane.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace weft::local {

void Control::wake(int world_rank) const {
  RankPage& peer = page(world_rank);
  if (peer.sleeping.load() == 0) return;
  peer.wake.fetch_add(1);
  ::syscall(SYS_futex, &peer.wake, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Lane::Lane(const Control& control, SharedBlocks& blocks, std::shared_ptr<const GroupInfo> group, std::vector<int> members,
           LaneLayout layout, size_t offset)
    : control_(control), blocks_(blocks), group_(std::move(group)), members_(std::move(members)),
      layout_(layout), offset_(offset),
      memory_(group_->segment->data() + offset), n_(layout.members) {
  me_ = static_cast<int>(std::find(members_.begin(), members_.end(), group_->me) - members_.begin());
  for (int m = 0; m < n_; ++m) ranks_.set(static_cast<size_t>(world_rank(m)));
  group_->segment->reserve(offset_, layout_.control_end());
}

void Lane::enqueue(std::shared_ptr<Op> op) {
  op->lane = shared_from_this();
  op->sequence = next_sequence_++;
  choose_source(*op);
  queue_.push_back(std::move(op));
}

bool Lane::advance() {
  moved_ = false;
  publish_ahead();
  fill_ahead();
  while (!queue_.empty() && step(*queue_.front())) {
    std::shared_ptr<Op> op = std::move(queue_.front());
    queue_.pop_front();
    --published_;
    --filling_;
    moved_ = true;
    // Members that failed may have taken their memory back while it was read: such a call never completes.
    if (op->in_place && control_.failed()) continue;
    op->on_complete();
    op->waits = Wait::drained;
    op->target = finished(op->sequence);
    op->complete = true;
    if (op->source == Source::shared && !all_consumed(op->target)) unreleased_.push_back(std::move(op));
    else op->released = true;
    publish_ahead();
    fill_ahead();
  }
  release_done();
  return moved_;
}

void Lane::clear() {
  queue_.clear();
  unreleased_.clear();
  published_ = filling_ = 0;
}

// Calls are published as soon as they are made, even while earlier ones are in flight: peers find them there when they come.
bool Lane::publish_ahead() {
  while (published_ < queue_.size()) {
    // Peers may be done with a call that this rank has still to work on: its own descriptor must stay, too.
    if (published_ == kRing) return false;
    Op& op = *queue_[published_];
    if (op.sequence >= kRing && !all_consumed(finished(op.sequence - kRing))) {
      blocked(op, Wait::ring, finished(op.sequence - kRing));
      return false;
    }
    publish(op);
    ++published_;
    moved_ = true;
  }
  return true;
}

void Lane::publish(Op& op) {
  Descriptor& d = descriptor(me_, op.sequence);
  d.call = op.call;
  d.dtype = op.dtype;
  d.reduce = op.reduction;
  d.root = op.root;
  d.count = op.count;
  describe_input(op, d);
  d.rounds = rounds_if_staged(op);
  d.first_slot = static_cast<uint32_t>(slots_used_ % kSlots);
  slots_used_ += op.my_rounds;
  d.stamp.store(op.sequence + 1);
  notify();
}

bool Lane::fill_ahead() {
  while (filling_ < published_) {
    Op& op = *queue_[filling_];
    if (op.next_fill == op.my_rounds) {
      ++filling_;
      continue;
    }
    const Descriptor& d = descriptor(me_, op.sequence);
    const uint64_t index = d.first_slot + op.next_fill;
    if (!all_consumed(slot_tag_[index % kSlots])) return false;
    if (!staging_reserved_) {
      group_->segment->reserve(offset_ + layout_.staging(me_), kSlots * layout_.slot_bytes);
      staging_reserved_ = true;
    }
    fill(op, slot(me_, index));
    ++op.next_fill;
    slot_tag_[index % kSlots] = tag(op.sequence, op.next_fill);
    signals(me_).filled.store(tag(op.sequence, op.next_fill));
    notify();
    moved_ = true;
  }
  return true;
}

// Moves the oldest call on; true when its output is valid and its input was taken.
bool Lane::step(Op& op) {
  if (published_ == 0) return false;  // publish_ahead() said why
  if (!pulls(op)) {
    set_consumed(finished(op.sequence));
    return op.next_fill == op.my_rounds || blocked_on_slot(op);
  }
  if (!op.gathered && !arrive(op)) return false;
  const uint32_t total = std::max<uint32_t>(op.rounds, 1);
  while (op.round < total) {
    if (!run_round(op)) return false;
    ++op.round;
    op.reduced = false;
    if (op.round < total) set_consumed(tag(op.sequence, op.round));
    moved_ = true;
    fill_ahead();
  }
  if (op.next_fill < op.my_rounds) return blocked_on_slot(op);
  set_consumed(finished(op.sequence));
  return true;
}

bool Lane::arrive(Op& op) {
  for (; op.arrived < n_; ++op.arrived) {
    if (!needs(op, op.arrived)) continue;
    const Descriptor& d = descriptor(op.arrived, op.sequence);
    if (d.stamp.load() != op.sequence + 1) return blocked(op, Wait::arrival, op.sequence + 1);
    check(op, op.arrived);
    op.rounds = std::max(op.rounds, d.rounds);
    op.any_staged |= d.source == Source::staged;
    op.in_place |= d.source == Source::shared;
    if (op.call == Call::all_to_all) op.peer_offsets.push_back(part_offset(d));
  }
  // An all-reduce in a shared block writes where peers may still read the result of an earlier call.
  if (op.call == Call::all_reduce && op.source == Source::shared && !all_consumed(tag(op.sequence, 0))) {
    return blocked(op, Wait::drained, tag(op.sequence, 0));
  }
  if (!op.any_staged) op.rounds = 0;
  op.gathered = true;
  return true;
}

bool Lane::all_filled(Op& op) {
  const uint64_t target = tag(op.sequence, op.round + 1);
  for (int m = 0; m < n_; ++m) {
    if (m != me_ && needs(op, m) && stages_round(op, m)) {
      if (signals(m).filled.load() < target) return blocked(op, Wait::filling, target);
    }
  }
  // This rank's own input is read where it is, but its part of an all-reduce's result goes into its slot.
  if (op.call == Call::all_reduce && op.my_rounds > 0 && op.next_fill <= op.round) return blocked_on_slot(op);
  return true;
}

bool Lane::run_round(Op& op) {
  if (!op.reduced) {
    if (!all_filled(op)) return false;
    if (op.call != Call::all_reduce || op.source == Source::carried || n_ == 1) {
      pull(op);
      return true;
    }
    reduce_own_part(op);
    signals(me_).reduced.store(tag(op.sequence, op.round + 1));
    notify();
    op.reduced = true;
    moved_ = true;
  }
  const uint64_t target = tag(op.sequence, op.round + 1);
  for (int m = 0; m < n_; ++m) {
    if (signals(m).reduced.load() < target) return blocked(op, Wait::reduction, target);
  }
  copy_results(op);
  return true;
}

bool Lane::blocked(Op& op, Wait why, uint64_t target) {
  op.waits = why;
  op.target = target;
  return false;
}

bool Lane::blocked_on_slot(Op& op) {
  const uint64_t index = descriptor(me_, op.sequence).first_slot + op.next_fill;
  return blocked(op, Wait::slot, slot_tag_[index % kSlots]);
}

bool Lane::all_consumed(uint64_t target) {
  // The counters only grow. A look at them fetches a line from each peer, and takes it from the peer that writes it in every
  // call: a rank that is a few calls behind the ring's end need not look.
  if (consumed_seen_ >= target) return true;
  uint64_t least = UINT64_MAX;
  for (int m = 0; m < n_; ++m) {
    if (m != me_) least = std::min(least, signals(m).consumed.load());
  }
  consumed_seen_ = least;
  return least >= target;
}

bool Lane::release_done() {
  while (!unreleased_.empty() && all_consumed(unreleased_.front()->target)) {
    unreleased_.front()->released = true;
    unreleased_.pop_front();
    moved_ = true;
  }
  return unreleased_.empty();
}

void Lane::set_consumed(uint64_t value) {
  std::atomic<uint64_t>& mine = signals(me_).consumed;
  if (mine.load(std::memory_order_relaxed) >= value) return;
  mine.store(value);
  notify();
}

void Lane::notify() const {
  if (control_.header().sleepers.load() == 0) return;
  for (int m = 0; m < n_; ++m) {
    if (m != me_) control_.wake(world_rank(m));
  }
}

RankSet Lane::missing(const Op& asked) const {
  // A call behind another one waits for what that one waits for.
  const Op& op = asked.complete || queue_.empty() ? asked : *queue_.front();
  RankSet late;
  for (int m = 0; m < n_; ++m) {
    if (m == me_) continue;
    bool is_late = false;
    switch (op.waits) {
      case Wait::nothing: break;
      case Wait::arrival: is_late = needs(op, m) && descriptor(m, op.sequence).stamp.load() != op.target; break;
      case Wait::filling:
        is_late = needs(op, m) && stages_round(op, m) && signals(m).filled.load() < op.target;
        break;
      case Wait::reduction: is_late = signals(m).reduced.load() < op.target; break;
      case Wait::ring:
      case Wait::drained:
      case Wait::slot: is_late = signals(m).consumed.load() < op.target; break;
    }
    if (is_late) late.set(static_cast<size_t>(world_rank(m)));
  }
  return late;
}

bool Lane::waits_for_arrival(const Op& asked) const {
  const Op& op = asked.complete || queue_.empty() ? asked : *queue_.front();
  return op.waits == Wait::arrival;
}

bool Lane::is_behind(const RankSet& world_ranks) const {
  // Calls are published when they are made, but for those more than kRing ahead.
  for (int m = 0; m < n_; ++m) {
    if (m == me_ || !world_ranks[static_cast<size_t>(world_rank(m))]) continue;
    if (descriptor(m, next_sequence_).stamp.load() == next_sequence_ + 1) return true;
  }
  return false;
}

std::string_view Lane::call_name(const Op& op) const {
  if (op.call == Call::message) return me_ == 0 ? "send" : "recv";
  return name_of(op.call);
}

}  // namespace weft::local
