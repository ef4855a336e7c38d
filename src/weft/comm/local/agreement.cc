// The check that all members of a lane make the same call, on what they published anyway.
#include <fmt/format.h>

#include <cstring>

#include "weft/comm/local/lane.h"

namespace weft::local {
namespace {

std::string text_of(Call call, Dtype dtype, Reduce reduction, int root, uint64_t count) {
  std::string text(name_of(call));
  if (call == Call::barrier) return text + "()";
  if (call == Call::all_to_all) return text + fmt::format("({})", name_of(dtype));
  text += fmt::format("({} x {}", count, name_of(dtype));
  if (reduction != Reduce::none) text += fmt::format(", {}", name_of(reduction));
  if (call == Call::broadcast || call == Call::reduce) text += fmt::format(", root {}", root);
  if (call == Call::message && root != 0) text += fmt::format(", tag {}", root);
  return text + ")";
}

}  // namespace

void Lane::check(const Op& op, int member) const {
  const Descriptor& d = descriptor(member, op.sequence);
  const bool same = d.call == op.call && d.dtype == op.dtype && d.reduce == op.reduction && d.root == op.root && d.count == op.count;
  const int peer = world_rank(member);
  const int self = world_rank(me_);
  Disagreement difference;
  difference.ranks.set(static_cast<size_t>(peer)).set(static_cast<size_t>(self));
  if (!same) {
    difference.text = fmt::format("ranks disagree on this call: rank {} made {}, rank {} made {}", self,
                                  text_of(op.call, op.dtype, op.reduction, op.root, op.count), peer,
                                  text_of(d.call, d.dtype, d.reduce, d.root, d.count));
    throw difference;
  }
  if (op.call != Call::all_to_all) return;
  uint64_t sent = 0;
  std::memcpy(&sent, d.payload + static_cast<size_t>(me_) * sizeof(uint64_t), sizeof(sent));
  const uint64_t expected = op.receive_bytes[static_cast<size_t>(member)];
  if (sent != expected) {
    difference.text = fmt::format("ranks disagree on this call: rank {} sends {} bytes to rank {}, which expects {}", peer, sent, self,
                                  expected);
    throw difference;
  }
}

}  // namespace weft::local
