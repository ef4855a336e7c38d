#include "weft/core/cause.h"

namespace weft {

std::string cause_text(std::string_view what) {
  constexpr std::string_view kTrace = "Exception raised from ";
  for (size_t at = what.find(kTrace); at != std::string_view::npos; at = what.find(kTrace, at + 1)) {
    if (at == 0 || what[at - 1] != '\n') continue;  // in the middle of a sentence
    what = what.substr(0, at);
    break;
  }
  if (const size_t end = what.find("] "); what.starts_with('[') && end != std::string_view::npos) {
    const std::string_view place = what.substr(1, end - 1);
    const size_t colon = place.rfind(':');
    const bool line = colon != std::string_view::npos && colon + 1 < place.size() &&
                      place.find_first_not_of("0123456789", colon + 1) == std::string_view::npos;
    if (line && place.find('\n') == std::string_view::npos) what.remove_prefix(end + 2);
  }
  const size_t last = what.find_last_not_of(" \n");
  return std::string(what.substr(0, last == std::string_view::npos ? 0 : last + 1));
}

std::string cause_line(std::string_view what) {
  const std::string text = cause_text(what);
  return text.substr(0, text.find('\n'));
}

}  // namespace weft
