// Schedules as text, one line per rank ("rank 0: F0 F1 B0 B1"), and as CSV in PyTorch's layout; both round-trip
// exactly.
//
// Text: F3.5 is micro-batch 3 on stage 5; the stage is left out where every rank holds the one stage of its own number.
// (F7.0+B3.7) is an overlapped pair. UNSHARD.1 and the like have no micro-batch. Lines that begin with # are comments.
// CSV: a row per rank, cells 5F3, 5SEND_F3, 1UNSHARD, 1REDUCE_GRAD, (0F7;7B3)OVERLAP_F_B; empty cells are idle slots.
#pragma once

#include <string>
#include <string_view>

#include "weft/schedule/action.h"

namespace weft::schedule {

std::string to_text(const Action& action, bool with_stage);
std::string to_text(const Schedule& schedule);

/// Sizes and the owner of each stage are those that the actions show. Throws ConfigError with rank, step and the text
/// that was not understood.
Schedule from_text(std::string_view text, std::string name = "custom");

std::string to_csv(const Schedule& schedule);
/// Reads PyTorch's compute-only and with-communication files. Throws ConfigError as from_text.
Schedule from_csv(std::string_view csv, std::string name = "custom");

}  // namespace weft::schedule
