#include "weft/schedule/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "weft/schedule/palette.h"
#include "weft/schedule/text.h"

namespace weft::schedule {
namespace {

/// Compute spans of one rank with the place of their picture: an overlapped pair shares its time half and half.
struct Block {
  const Action* action;
  double start, end;
};

std::vector<std::vector<Block>> blocks_of(const Schedule& schedule, const Timeline& timeline) {
  std::vector<std::vector<Block>> ranks(schedule.ranks.size());
  for (const Span& span : timeline.spans) {
    if (span.stream != Stream::compute) continue;
    std::vector<Block>& row = ranks[static_cast<size_t>(span.rank)];
    Block block{&span.action, span.start, span.end};
    if (!row.empty() && row.back().action->with_next && row.back().start == span.start && span.end > span.start) {
      block.start = row.back().end = (span.start + span.end) / 2;
    }
    row.push_back(block);
  }
  return ranks;
}

/// The shortest action that still deserves a cell: very short ones next to long ones would blow the picture up.
double shortest(const Timeline& timeline) {
  constexpr double least_share = 0.25;  // of the longest
  double low = std::numeric_limits<double>::max(), high = 0;
  for (const Span& span : timeline.spans) {
    if (span.stream != Stream::compute || span.end <= span.start) continue;
    low = std::min(low, span.end - span.start);
    high = std::max(high, span.end - span.start);
  }
  return high == 0 ? 1 : std::max(low, least_share * high);
}

/// Calls row(first cell, cells) for consecutive bands that fit the width.
std::string in_bands(const Schedule& schedule, int cells, int per_band, double cells_per_time, const auto& row) {
  const int label = static_cast<int>(std::to_string(schedule.ranks.size() - 1).size());
  std::string out;
  for (int from = 0; from < cells; from += per_band) {
    if (cells > per_band) out += fmt::format("{}time {:.3g}\n", from > 0 ? "\n" : "", from / cells_per_time);
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      out += fmt::format("rank {:>{}} ", rank, label) + row(rank, from, std::min(per_band, cells - from)) + "\n";
    }
  }
  return out;
}

int label_columns(const Schedule& schedule) {
  return static_cast<int>(std::string_view("rank  ").size() + std::to_string(schedule.ranks.size() - 1).size());
}

/// ASCII: each action's name, then dashes to its end; a blank keeps neighbours apart.
std::string draw_plain(const Schedule& schedule, const Timeline& timeline, int width) {
  const bool with_stage = !schedule.one_stage_per_rank();
  size_t longest = 0;
  for (const Span& span : timeline.spans) {
    if (span.stream == Stream::compute) longest = std::max(longest, to_text(span.action, with_stage).size());
  }
  const double scale = static_cast<double>(longest + 1) / shortest(timeline);
  const int cells = static_cast<int>(std::lround(timeline.makespan * scale));
  const auto ranks = blocks_of(schedule, timeline);
  std::vector<std::string> rows;
  for (const auto& blocks : ranks) {
    std::string row(static_cast<size_t>(cells), '.');
    for (const Block& block : blocks) {
      const size_t from = static_cast<size_t>(std::lround(block.start * scale)),
                   to = static_cast<size_t>(std::lround(block.end * scale));
      if (to <= from) continue;
      std::string cell = to_text(*block.action, with_stage).substr(0, to - from);
      cell.resize(to - from, '-');
      if (cell.size() > 1) cell.back() = ' ';
      row.replace(from, to - from, cell);
    }
    rows.push_back(std::move(row));
  }
  return in_bands(schedule, cells, std::max(1, width - label_columns(schedule)), scale,
                  [&](size_t rank, int from, int count) {
                    return rows[rank].substr(static_cast<size_t>(from), static_cast<size_t>(count));
                  });
}

/// Half-column cells: the colour of each, and for each whole column the character of a number that stands there.
struct ColourRow {
  std::vector<int> colours;
  std::string text;
};

ColourRow colour_row(const Schedule& schedule, const std::vector<Block>& blocks, int halves, double scale,
                     bool numbers) {
  ColourRow row{std::vector<int>(static_cast<size_t>(halves), kIdle.ansi),
                std::string(static_cast<size_t>(halves / 2), ' ')};
  for (const Block& block : blocks) {
    const int from = static_cast<int>(std::lround(block.start * scale)),
              to = std::min(halves, static_cast<int>(std::lround(block.end * scale)));
    for (int k = from; k < to; ++k) row.colours[static_cast<size_t>(k)] = colour_of(schedule, *block.action).ansi;
    const int first = (from + 1) / 2, columns = to / 2 - first;  // whole columns inside the block
    if (!numbers) continue;
    const std::string number = std::to_string(block.action->micro_batch);
    const int size = static_cast<int>(number.size());
    if (columns >= size) row.text.replace(static_cast<size_t>(first + (columns - size) / 2), number.size(), number);
  }
  return row;
}

std::string paint(const ColourRow& row, int from_column, int columns) {
  std::string out;
  int background = -1, foreground = -1;
  for (int column = from_column; column < from_column + columns; ++column) {
    const int left = row.colours[static_cast<size_t>(2 * column)],
              right = row.colours[static_cast<size_t>(2 * column + 1)];
    const char digit = row.text[static_cast<size_t>(column)];
    constexpr int black = 16;
    const int front = left == right ? black : left;
    if (right != background) out += fmt::format("\x1b[48;5;{}m", background = right);
    if (front != foreground && (left != right || digit != ' ')) out += fmt::format("\x1b[38;5;{}m", foreground = front);
    out += left != right ? "▌" : std::string(1, digit);
  }
  return out + "\x1b[0m";
}

std::string draw_colour(const Schedule& schedule, const Timeline& timeline, int width) {
  const int columns = std::max(1, width - label_columns(schedule));
  // As large as fits on one band, at most a number with a margin; at least half a column for the shortest action.
  const int digits = static_cast<int>(std::to_string(std::max(0, schedule.micro_batches - 1)).size());
  const int largest = 2 * (digits + 2);
  const double unit = shortest(timeline);
  const int halves_per_unit = std::clamp(static_cast<int>(2 * columns * unit / timeline.makespan), 1, largest);
  const double scale = halves_per_unit / unit;
  const int halves = 2 * static_cast<int>(std::ceil(std::lround(timeline.makespan * scale) / 2.0));
  const auto ranks = blocks_of(schedule, timeline);
  // All the numbers of long actions or none: a few here and there only disturb.
  const bool numbers = halves_per_unit >= std::max(2, digits);
  std::vector<ColourRow> rows;
  for (const auto& blocks : ranks) rows.push_back(colour_row(schedule, blocks, halves, scale, numbers));
  return in_bands(schedule, halves / 2, columns, scale / 2,
                  [&](size_t rank, int from, int count) { return paint(rows[rank], from, count); });
}

std::string legend(const Schedule& schedule, bool colour) {
  constexpr std::pair<Kind, const char*> names[] = {{Kind::forward, "forward"},
                                                    {Kind::backward, "backward"},
                                                    {Kind::input_grad, "input gradient"},
                                                    {Kind::weight_grad, "weight gradient"}};
  std::string out;
  for (const auto& [kind, name] : names) {
    const bool used = std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [&, k = kind](const auto& list) {
      return std::any_of(list.begin(), list.end(), [&](const Action& a) { return a.kind == k; });
    });
    if (!used) continue;
    out += out.empty() ? "" : "   ";
    if (!colour) {
      out += fmt::format("{} {}", kind_name(kind), name);
      continue;
    }
    for (int stage = 0; stage < schedule.stage_count(); stage += schedule.rank_count()) {
      if (stage > schedule.rank_count()) break;  // tones repeat after two chunks
      for (int j : {0, 1}) out += fmt::format("\x1b[48;5;{}m ", colour_of(schedule, {kind, false, j, stage}).ansi);
    }
    out += fmt::format("\x1b[0m {}", name);
  }
  return out + (colour ? fmt::format("   \x1b[48;5;{}m  \x1b[0m idle\n", kIdle.ansi) : "   . idle\n");
}

}  // namespace

std::string draw(const Schedule& schedule, const Timeline& timeline, const DrawOptions& options) {
  if (timeline.makespan <= 0) return "";
  const std::string grid =
      options.colour ? draw_colour(schedule, timeline, options.width) : draw_plain(schedule, timeline, options.width);
  return grid + "\n" + legend(schedule, options.colour);
}

std::string draw_svg(const Schedule& schedule, const Timeline& timeline) {
  constexpr double left = 70, top = 44, row_height = 26, width = 1200, margin = 20, digit = 6.5;
  const double rows = static_cast<double>(schedule.ranks.size());
  const double scale = timeline.makespan > 0 ? (width - left - margin) / timeline.makespan : 0;
  const double bottom = top + rows * row_height;
  std::string name;
  for (char c : schedule.name) name += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n"
      "<rect width=\"{0:g}\" height=\"{1:g}\" fill=\"white\"/>\n"
      "<text x=\"{2:g}\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{3}: {4} ranks, {5} micro-batches, bubble "
      "{6:.1f} %</text>\n",
      width, bottom + 64, left, name, schedule.ranks.size(), schedule.micro_batches, 100 * timeline.bubble());
  const auto blocks = blocks_of(schedule, timeline);
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    const double y = top + static_cast<double>(rank) * row_height;
    svg += fmt::format("<text x=\"{:g}\" y=\"{:g}\" text-anchor=\"end\">rank {}</text>\n", left - 8, y + 17, rank);
    svg += fmt::format("<rect x=\"{:g}\" y=\"{:g}\" width=\"{:g}\" height=\"{:g}\" fill=\"{}\"/>\n", left, y + 1,
                       width - left - margin, row_height - 2, kIdle.hex);
    for (const Block& block : blocks[rank]) {
      const double x = left + block.start * scale, w = (block.end - block.start) * scale;
      svg += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{:g}\" width=\"{:.2f}\" height=\"{:g}\" fill=\"{}\"><title>{}: {:g} to "
          "{:g}</title></rect>\n",
          x, y + 1, w, row_height - 2, colour_of(schedule, *block.action).hex, to_text(*block.action, true),
          block.start, block.end);
      const std::string number = std::to_string(block.action->micro_batch);
      if (w > digit * (static_cast<double>(number.size()) + 0.5))
        svg +=
            fmt::format("<text x=\"{:.2f}\" y=\"{:g}\" text-anchor=\"middle\">{}</text>\n", x + w / 2, y + 17, number);
    }
  }
  svg += fmt::format(
      "<text x=\"{:g}\" y=\"{:g}\">0</text><text x=\"{:g}\" y=\"{:g}\" text-anchor=\"end\">time {:g}</text>\n", left,
      bottom + 16, width - margin, bottom + 16, timeline.makespan);
  double x = left;
  for (const auto& [kind, text] : {std::pair{Kind::forward, "forward"},
                                   {Kind::backward, "backward"},
                                   {Kind::input_grad, "input gradient"},
                                   {Kind::weight_grad, "weight gradient"}}) {
    svg += fmt::format(
        "<rect x=\"{0:g}\" y=\"{1:g}\" width=\"12\" height=\"12\" fill=\"{2}\"/><text x=\"{3:g}\" "
        "y=\"{4:g}\">{5}</text>\n",
        x, bottom + 34, colour_of(schedule, {kind, false, 0, 0}).hex, x + 18, bottom + 44, text);
    x += 120;
  }
  return svg + "</svg>\n";
}

}  // namespace weft::schedule
