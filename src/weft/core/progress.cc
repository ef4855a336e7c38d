#include "weft/core/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace weft {
namespace {

constexpr int kUnknownWidth = 80;

bool starts_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
}

/// Bytes of the first `columns` characters.
size_t prefix_bytes(std::string_view text, int columns) {
  size_t i = 0;
  for (int count = 0; i < text.size(); ++i) {
    if (starts_character(text[i]) && count++ == columns) break;
  }
  return i;
}

bool is_terminal(std::FILE* out) {
  // `weft run` passes one rank's bytes on to its terminal unchanged and says so.
  if (const char* told = std::getenv("WEFT_PROGRESS"); told && std::strcmp(told, "terminal") == 0) return true;
  const char* kind = std::getenv("TERM");
  return ::isatty(::fileno(out)) && !(kind && std::strcmp(kind, "dumb") == 0);
}

}  // namespace

int terminal_width(std::FILE* out) {
  winsize size{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  if (const char* columns = std::getenv("COLUMNS"); columns && std::atoi(columns) > 0) return std::atoi(columns);
  return kUnknownWidth;
}

std::string fit_columns(std::string_view text, int columns) {
  if (columns <= 0) return {};
  if (prefix_bytes(text, columns) == text.size()) return std::string(text);
  constexpr std::string_view kMark = "...";
  const int kept = columns - static_cast<int>(kMark.size());
  if (kept <= 0) return std::string(text.substr(0, prefix_bytes(text, columns)));
  return std::string(text.substr(0, prefix_bytes(text, kept))) + std::string(kMark);
}

ProgressLine::ProgressLine(Options options) : options_(options), terminal_(is_terminal(options.out)) {}

ProgressLine::~ProgressLine() {
  finish();
}

void ProgressLine::draw(std::string_view text) {
  if (terminal_) {
    // One column stays free: a full last column makes some terminals wrap. \033[K clears what a longer line left.
    std::fprintf(options_.out, "\r%s\033[K", fit_columns(text, terminal_width(options_.out) - 1).c_str());
    open_ = true;
  } else {
    std::fprintf(options_.out, "%.*s\n", static_cast<int>(text.size()), text.data());
  }
  std::fflush(options_.out);
  skipped_.clear();
}

void ProgressLine::show(std::string_view text) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) {
    skipped_ = text;
    return;
  }
  next_ = now + (terminal_ ? options_.redraw_interval : options_.plain_interval);
  draw(text);
}

void ProgressLine::keep(std::string_view text) {
  if (terminal_ && open_) std::fputs("\r\033[K", options_.out);
  open_ = false;
  skipped_.clear();  // older than what is kept
  std::fprintf(options_.out, "%.*s\n", static_cast<int>(text.size()), text.data());
  std::fflush(options_.out);
}

void ProgressLine::finish() {
  if (!skipped_.empty()) draw(std::string(skipped_));
  if (open_) std::fputc('\n', options_.out);
  open_ = false;
  std::fflush(options_.out);
}

}  // namespace weft
