// What the library has to say beside its results: rare notes and warnings. The host program may take them over.
#pragma once

#include <functional>
#include <string_view>

namespace weft {

enum class LogLevel { note, warning };
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Where notes and warnings go from now on, from any thread, one at a time. Empty: nowhere. Until it is called they are lines
/// on stderr: "weft: text" and "weft: warning: text". Returns the sink that was set before.
LogSink set_log(LogSink sink);

/// Says `text` (one line, without a newline). Any thread. What the sink throws is dropped.
void log(LogLevel level, std::string_view text) noexcept;

}  // namespace weft
