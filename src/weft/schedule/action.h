// A pipeline schedule as data: one list of actions per rank. Generators write it, passes rewrite it, the validator
// proves it, the simulator times it and the executor runs it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::schedule {

enum class Kind : uint8_t {
  forward,          ///< F
  input_grad,       ///< I: gradient of the stage's input
  weight_grad,      ///< W: gradient of the stage's parameters
  backward,         ///< B = I + W
  send_activation,  ///< SEND_F: starts sending this stage's output to the rank of stage + 1
  recv_activation,  ///< RECV_F: starts receiving this stage's input from the rank of stage - 1
  send_grad,        ///< SEND_B: starts sending the gradient of this stage's input to the rank of stage - 1
  recv_grad,        ///< RECV_B: starts receiving the gradient of this stage's output from the rank of stage + 1
  unshard,          ///< UNSHARD: starts gathering the stage's parameters
  reshard,          ///< RESHARD: frees the gathered parameters
  reduce,           ///< REDUCE: starts reducing the stage's gradients, once, after its last weight gradient
};
inline constexpr int kKinds = 11;

/// Name in the text form: "F", "SEND_F", "REDUCE", ...
std::string_view kind_name(Kind kind);
constexpr bool is_compute(Kind kind) {
  return kind <= Kind::backward;
}
/// UNSHARD, RESHARD and REDUCE concern a stage, not a micro-batch.
constexpr bool is_per_stage(Kind kind) {
  return kind >= Kind::unshard;
}

struct Action {
  Kind kind = Kind::forward;
  bool with_next = false;    ///< this action and the next one form an overlapped pair, written (F7.0+B3.7)
  int32_t micro_batch = -1;  ///< -1 where the kind is per stage
  int32_t stage = 0;         ///< virtual stage, 0 next to the input

  bool operator==(const Action&) const = default;
};

struct Schedule {
  std::string name;
  int micro_batches = 0;
  bool forward_only = false;               ///< evaluation: no backward is expected
  std::vector<int> owner;                  ///< owner[stage] = rank that holds it
  std::vector<std::vector<Action>> ranks;  ///< ranks[r] = what rank r does, in order

  int rank_count() const { return static_cast<int>(ranks.size()); }
  int stage_count() const { return static_cast<int>(owner.size()); }
  /// The first and the last stage are next to the input and to the loss.
  bool is_last(int stage) const { return stage + 1 == stage_count(); }
  /// Whether stages and ranks are the same; the text form then leaves the stage out.
  bool one_stage_per_rank() const;
};

}  // namespace weft::schedule
