#include "weft/launch/output.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "weft/core/error.h"

namespace weft::launch {
namespace {

constexpr size_t kTailLines = 20;         // about a screen half: an error text with its context
constexpr size_t kLongestLine = 1 << 16;  // a line without end is cut here, so that memory stays bounded

/// What a terminal would show of a line that was rewritten: the part behind the last carriage return, without the
/// control sequences that erase.
std::string settled(std::string text) {
  if (const size_t end = text.find_last_not_of('\r'); end == std::string::npos)
    return "";
  else
    text.resize(end + 1);
  if (const size_t start = text.rfind('\r'); start != std::string::npos) text.erase(0, start + 1);
  constexpr std::string_view kErase = "\033[K";
  for (size_t at = text.find(kErase); at != std::string::npos; at = text.find(kErase)) text.erase(at, kErase.size());
  return text;
}

}  // namespace

RankOutput::RankOutput(int rank, const std::filesystem::path& log, Show show)
    : rank_(rank), log_(log), show_(show), file_(std::fopen(log.c_str(), "we")) {
  if (!file_)
    throw ConfigError(fmt::format("{}: cannot be opened for writing: {}", log.string(), std::strerror(errno)));
}

void RankOutput::take(Stream stream, std::string_view bytes) {
  std::FILE* const live = stream == out ? stdout : stderr;
  if (show_ == Show::raw) {
    std::fwrite(bytes.data(), 1, bytes.size(), live);
    std::fflush(live);
  }
  std::string& unfinished = unfinished_[stream];
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    unfinished += bytes.substr(0, newline);
    if (newline == std::string_view::npos) {
      // A progress line is rewritten for hours: only what stands since the last carriage return can matter.
      const size_t rewritten = unfinished.rfind('\r');
      if (rewritten != std::string::npos && rewritten > 0 && rewritten + 1 < unfinished.size())
        unfinished.erase(0, rewritten);
      if (unfinished.size() > kLongestLine) line(stream, std::exchange(unfinished, {}));
      break;
    }
    bytes.remove_prefix(newline + 1);
    line(stream, std::exchange(unfinished, {}));
  }
  flush_log();
  if (show_ == Show::prefixed) std::fflush(live);
}

void RankOutput::finish() {
  for (const Stream stream : {out, err}) {
    if (!unfinished_[stream].empty()) line(stream, std::exchange(unfinished_[stream], {}));
  }
  flush_log();
  while (!tail_.empty() && tail_.back().empty()) tail_.pop_back();
}

/// A full disk must not stop the ranks, nor go unsaid.
void RankOutput::flush_log() {
  if (std::fflush(file_.get()) == 0 && !std::ferror(file_.get())) return;
  if (!std::exchange(log_incomplete_, true))
    std::fprintf(stderr, "weft run: log of rank %d is incomplete: %s: %s\n", rank_, log_.c_str(), std::strerror(errno));
}

void RankOutput::line(Stream stream, std::string text) {
  text = settled(std::move(text));
  std::fprintf(file_.get(), "%s\n", text.c_str());
  if (show_ == Show::prefixed) std::fprintf(stream == out ? stdout : stderr, "[%d] %s\n", rank_, text.c_str());
  tail_.push_back(std::move(text));
  if (tail_.size() > kTailLines) tail_.pop_front();
}

}  // namespace weft::launch
