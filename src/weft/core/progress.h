// Progress for people: one line that is rewritten on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>

namespace weft {

/// Not thread-safe. WEFT_PROGRESS=terminal in the environment rewrites the line whatever `out` is. Writes to stderr by
/// default: results own stdout.
class ProgressLine {
 public:
  struct Options {
    std::FILE* out = stderr;
    /// Without a terminal, show() prints at most one line in this time, so that log files stay short.
    std::chrono::milliseconds plain_interval = std::chrono::seconds(10);
    /// On a terminal, show() redraws at most this often.
    std::chrono::milliseconds redraw_interval = std::chrono::milliseconds(50);
  };
  ProgressLine() : ProgressLine(Options{}) {}
  explicit ProgressLine(Options options);
  /// Ends the line that stands on the terminal.
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// The state now. May be skipped (see Options); a later call replaces it. Cut to the terminal's width.
  void show(std::string_view text);
  /// A line that stays, in both modes.
  void keep(std::string_view text);
  /// Shows the last skipped state, if any, and ends the line.
  void finish();

  bool terminal() const { return terminal_; }

 private:
  void draw(std::string_view text);

  Options options_;
  bool terminal_ = false;
  bool open_ = false;  ///< text stands on the terminal's current line
  std::string skipped_;
  std::chrono::steady_clock::time_point next_;
};

/// Columns of the terminal behind `out`, else COLUMNS, else 80.
int terminal_width(std::FILE* out);

/// At most `columns` characters of UTF-8 text; what was cut is shown as "...".
std::string fit_columns(std::string_view text, int columns);

}  // namespace weft
