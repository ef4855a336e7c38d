// Reads the flight logs of all ranks and says who waits for whom.
#pragma once

#include <filesystem>

#include "weft/core/json.h"

namespace weft::cli {

/// Reads FOLDER/flight-rank*.json. ConfigError when there is none or one cannot be read. Fields of the result:
///   ranks      world ranks that left a log;  no_log: those that others name as members and that left none
///   failures   [{"rank","text"}]: why ranks say that the world failed
///   waits      [{"rank","op","seq","group","for":[ranks],"seconds"}]: each rank's oldest call that did not end, and the members
///              that have not made it
///   difference null, or {"group","seq","calls":[{"rank","call"}]}: the first collective that is not the same on all members
///   verdict    one sentence per finding, the most likely culprit first
Json read_flight_logs(const std::filesystem::path& folder);

/// As text for a terminal.
std::string flight_report_text(const Json& report);

}  // namespace weft::cli
