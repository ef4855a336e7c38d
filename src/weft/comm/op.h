// The operations of a Comm, as named in errors, the flight log and traffic counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace weft::detail {

enum class CommOp : uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, barrier };
inline constexpr size_t kCommOps = 8;

constexpr std::string_view name_of(CommOp op) {
  constexpr std::string_view names[kCommOps] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                                "broadcast",  "send",       "recv",           "barrier"};
  return names[static_cast<size_t>(op)];
}

/// Messages between a pair are numbered apart from the group's collectives: the other members do not take part.
constexpr bool is_message(CommOp op) { return op == CommOp::send || op == CommOp::recv; }

}  // namespace weft::detail
