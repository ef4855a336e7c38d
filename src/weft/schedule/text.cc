#include "weft/schedule/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "weft/core/error.h"

namespace weft::schedule {
namespace {

// A larger number in a file is a typing error, and would size tables.
constexpr int kLargestNumber = 1 << 20;

std::string_view trim(std::string_view s) {
  const auto space = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!s.empty() && space(s.front())) s.remove_prefix(1);
  while (!s.empty() && space(s.back())) s.remove_suffix(1);
  return s;
}

/// Takes a number off the front.
std::optional<int> take_number(std::string_view& s) {
  int value = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  if (error != std::errc() || value < 0 || value > kLargestNumber || s.front() == '-') return std::nullopt;
  s.remove_prefix(static_cast<size_t>(end - s.data()));
  return value;
}

/// Takes the longest kind name off the front. PyTorch writes REDUCE_GRAD for our REDUCE.
std::optional<Kind> take_kind(std::string_view& s, bool csv) {
  std::optional<Kind> best;
  size_t length = 0;
  for (int k = 0; k < kKinds; ++k) {
    const Kind kind = static_cast<Kind>(k);
    const std::string_view name = csv && kind == Kind::reduce ? "REDUCE_GRAD" : kind_name(kind);
    if (name.size() > length && s.starts_with(name)) best = kind, length = name.size();
  }
  s.remove_prefix(length);
  return best;
}

/// "F3.5", "F3" (the rank's own stage) or "REDUCE.1".
std::optional<Action> parse_text_action(std::string_view s, int rank) {
  const auto kind = take_kind(s, false);
  if (!kind) return std::nullopt;
  Action action{.kind = *kind, .stage = rank};
  if (!is_per_stage(*kind)) {
    const auto micro_batch = take_number(s);
    if (!micro_batch) return std::nullopt;
    action.micro_batch = *micro_batch;
  }
  if (s.starts_with('.')) {
    s.remove_prefix(1);
    const auto stage = take_number(s);
    if (!stage) return std::nullopt;
    action.stage = *stage;
  }
  return s.empty() ? std::optional(action) : std::nullopt;
}

/// "5F3" or "1UNSHARD".
std::optional<Action> parse_csv_action(std::string_view s, int) {
  const auto stage = take_number(s);
  if (!stage) return std::nullopt;
  const auto kind = take_kind(s, true);
  if (!kind) return std::nullopt;
  Action action{.kind = *kind, .stage = *stage};
  if (!is_per_stage(*kind)) {
    const auto micro_batch = take_number(s);
    if (!micro_batch) return std::nullopt;
    action.micro_batch = *micro_batch;
  }
  return s.empty() ? std::optional(action) : std::nullopt;
}

/// One word: an action, or a pair in brackets split at `separator`. False if it is neither.
bool append_word(std::string_view word, int rank, char separator, std::string_view pair_suffix, const auto& parse,
                 std::vector<Action>& list) {
  if (!word.starts_with('(')) {
    const auto action = parse(word, rank);
    if (action) list.push_back(*action);
    return action.has_value();
  }
  const size_t middle = word.find(separator), close = word.find(')');
  if (middle == word.npos || close == word.npos || close < middle || word.substr(close + 1) != pair_suffix)
    return false;
  auto first = parse(word.substr(1, middle - 1), rank),
       second = parse(word.substr(middle + 1, close - middle - 1), rank);
  if (!first || !second) return false;
  first->with_next = true;
  list.push_back(*first);
  list.push_back(*second);
  return true;
}

[[noreturn]] void refuse(int rank, size_t step, std::string_view word, std::string_view example) {
  throw ConfigError(fmt::format("rank {} step {}: \"{}\" is not an action; write for instance {}", rank, step,
                                word.substr(0, 40), example));
}

/// Fills in what the actions show: number of micro-batches, stages and their ranks.
Schedule finish(Schedule schedule) {
  bool any_backward = false;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (size_t step = 0; step < schedule.ranks[rank].size(); ++step) {
      const Action& action = schedule.ranks[rank][step];
      schedule.micro_batches = std::max(schedule.micro_batches, action.micro_batch + 1);
      any_backward = any_backward || (is_compute(action.kind) && action.kind != Kind::forward);
      const size_t stage = static_cast<size_t>(action.stage);
      if (stage >= schedule.owner.size()) schedule.owner.resize(stage + 1, -1);
      if (schedule.owner[stage] == -1) schedule.owner[stage] = static_cast<int>(rank);
      if (schedule.owner[stage] != static_cast<int>(rank)) {
        throw ConfigError(
            fmt::format("rank {} step {}: {} runs on stage {}, which rank {} holds; a stage belongs to one rank", rank,
                        step, to_text(action, true), stage, schedule.owner[stage]));
      }
    }
  }
  for (size_t stage = 0; stage < schedule.owner.size(); ++stage) {
    if (schedule.owner[stage] == -1) {
      throw ConfigError(
          fmt::format("no rank has an action of stage {}, although stage {} exists; number the stages 0, 1, 2, ...",
                      stage, schedule.owner.size() - 1));
    }
  }
  if (schedule.owner.empty())
    throw ConfigError("the schedule has no actions; write a line like \"rank 0: F0 B0\" per rank");
  schedule.forward_only = !any_backward;
  return schedule;
}

/// Calls `line(text)` for every line.
void for_each_line(std::string_view text, const auto& line) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

std::string to_csv_cell(const Action& a) {
  const std::string_view name = a.kind == Kind::reduce ? "REDUCE_GRAD" : kind_name(a.kind);
  return is_per_stage(a.kind) ? fmt::format("{}{}", a.stage, name)
                              : fmt::format("{}{}{}", a.stage, name, a.micro_batch);
}

}  // namespace

std::string to_text(const Action& action, bool with_stage) {
  std::string text(kind_name(action.kind));
  if (!is_per_stage(action.kind)) text += std::to_string(action.micro_batch);
  return with_stage ? fmt::format("{}.{}", text, action.stage) : text;
}

std::string to_text(const Schedule& schedule) {
  const bool with_stage = !schedule.one_stage_per_rank();
  std::string text;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    text += fmt::format("rank {}:", rank);
    bool in_pair = false;
    for (const Action& action : schedule.ranks[rank]) {
      text += in_pair ? "+" : action.with_next ? " (" : " ";
      text += to_text(action, with_stage);
      if (in_pair) text += ")";
      in_pair = action.with_next && !in_pair;
    }
    text += "\n";
  }
  return text;
}

Schedule from_text(std::string_view text, std::string name) {
  Schedule schedule{.name = std::move(name)};
  for_each_line(text, [&](std::string_view line) {
    line = trim(line);
    if (line.empty() || line.starts_with('#')) return;
    const std::string expected = fmt::format("rank {}:", schedule.ranks.size());
    if (!line.starts_with(expected)) {
      throw ConfigError(
          fmt::format("expected a line that begins with \"{}\", found \"{}\"", expected, line.substr(0, 40)));
    }
    line.remove_prefix(expected.size());
    const int rank = static_cast<int>(schedule.ranks.size());
    std::vector<Action>& list = schedule.ranks.emplace_back();
    while (!(line = trim(line)).empty()) {
      const std::string_view word = line.substr(0, line.find_first_of(" \t"));
      if (!append_word(word, rank, '+', "", parse_text_action, list)) {
        refuse(rank, list.size(), word, "F3, B3, F3.5 (micro-batch 3, stage 5), SEND_F3.5, REDUCE.5 or (F7.0+B3.7)");
      }
      line.remove_prefix(word.size());
    }
  });
  return finish(std::move(schedule));
}

std::string to_csv(const Schedule& schedule) {
  std::string csv;
  for (const auto& list : schedule.ranks) {
    for (size_t step = 0; step < list.size(); ++step) {
      if (step > 0) csv += ",";
      if (list[step].with_next && step + 1 < list.size()) {
        csv += fmt::format("({};{})OVERLAP_F_B", to_csv_cell(list[step]), to_csv_cell(list[step + 1]));
        ++step;
      } else {
        csv += to_csv_cell(list[step]);
      }
    }
    csv += "\n";
  }
  return csv;
}

Schedule from_csv(std::string_view csv, std::string name) {
  Schedule schedule{.name = std::move(name)};
  for_each_line(csv, [&](std::string_view line) {
    const int rank = static_cast<int>(schedule.ranks.size());
    std::vector<Action>& list = schedule.ranks.emplace_back();
    for (bool more = true; more;) {
      const size_t comma = line.find(',');
      std::string_view cell = trim(line.substr(0, comma));
      more = comma != line.npos;
      if (more) line.remove_prefix(comma + 1);
      if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') cell = trim(cell.substr(1, cell.size() - 2));
      // PyTorch's explicit waits for sends and reductions say nothing that the actions themselves do not.
      if (cell.empty() || cell.find("WAIT_") != cell.npos) continue;
      if (!append_word(cell, rank, ';', "OVERLAP_F_B", parse_csv_action, list)) {
        refuse(rank, list.size(), cell,
               "5F3 (stage 5, micro-batch 3), 5B3, 5SEND_F3, 5REDUCE_GRAD or (0F7;7B3)OVERLAP_F_B");
      }
    }
  });
  return finish(std::move(schedule));
}

}  // namespace weft::schedule
