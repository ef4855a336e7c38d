// Passes: rewrite a schedule, keeping its compute actions in order.
#pragma once

#include "weft/schedule/action.h"

namespace weft::schedule {

/// Drops every action of micro-batches >= count. A valid schedule stays valid: whole dependency chains disappear.
void keep_micro_batches(Schedule& schedule, int count);

/// Replaces each B of one rank by I, with its W `delay` backwards later; what is owed at the end follows in order.
void split_backward(std::vector<Action>& list, int delay);

/// Merges an I that is directly followed by its own W into B.
void merge_backward(Schedule& schedule);

/// Adds SEND and RECV of activations and gradients between stages on different ranks. All four only start a transfer;
/// the compute action that needs the data waits. There is one order of the whole in which every RECV follows its SEND
/// at once, so that even blocking calls cannot deadlock, and between two ranks sends and receives have the same order.
/// The schedule must be valid and without communication.
void add_communication(Schedule& schedule);

struct Sharding {
  /// Stages of one rank whose parameters may be whole at the same time: the current one, and those gathered ahead.
  int whole_stages = 2;
};

/// Adds UNSHARD (ahead of use), RESHARD and REDUCE per stage. W needs no parameters; a stage is reduced after its last
/// W.
void add_sharding(Schedule& schedule, const Sharding& sharding = {});

/// Adds REDUCE alone: data parallelism without sharded parameters.
void add_reduction(Schedule& schedule);

/// Only the compute actions.
void strip_communication(Schedule& schedule);

}  // namespace weft::schedule
