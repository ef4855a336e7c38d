// Whether another process of this host still runs, as the system knows it.
#pragma once

#include <string>

namespace weft::detail {

/// Names this machine (its boot) and pid name space: containers are hosts of their own.
const std::string& this_host();

/// Names this process for the others: host and pid name space, pid, start time.
const std::string& this_process();

/// True when `process` is of this host and pid name space and has ended, is a zombie, or is stopped; false when it runs or
/// nothing can be said.
bool process_ended_or_stopped(const std::string& process);

}  // namespace weft::detail
