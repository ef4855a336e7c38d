#include "weft/comm/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "weft/comm/crossing.h"
#include "weft/comm/state.h"
#include "weft/core/error.h"
#include "weft/core/log.h"

namespace weft {
namespace {

// Axes that a mesh may leave out: they have size 1. Any other unknown name is a mistake.
constexpr std::string_view kKnownAxes[] = {"pp", "dp_replicate", "dp_shard", "dp", "cp", "tp", "ep", "etp", "edp"};
// Axes along which every layer communicates several times: their groups belong on one node.
constexpr std::string_view kNodeAxes[] = {"tp", "etp"};

std::vector<std::string> names_of(const std::vector<Axis>& axes) {
  std::vector<std::string> names;
  for (const Axis& axis : axes) names.push_back(axis.name);
  return names;
}

std::string product_text(const std::vector<Axis>& axes) {
  std::vector<std::string> parts;
  for (const Axis& axis : axes) parts.push_back(fmt::format("{}={}", axis.name, axis.size));
  return fmt::format("{}", fmt::join(parts, " x "));
}

void check_axes(const std::vector<Axis>& axes, int world_size) {
  Findings findings;
  int64_t product = 1;
  for (size_t i = 0; i < axes.size(); ++i) {
    const Axis& axis = axes[i];
    const auto same = [&](const Axis& other) { return other.name == axis.name; };
    if (axis.name.empty()) findings.add(fmt::format("axis {}", i), "has no name");
    if (axis.size < 1) findings.add(axis.name, fmt::format("size {} is not positive", axis.size));
    if (std::find_if(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(i), same) !=
        axes.begin() + static_cast<std::ptrdiff_t>(i)) {
      findings.add(axis.name, "is named twice");
    }
    if (axis.name == "dp" && std::any_of(axes.begin(), axes.end(), [](const Axis& other) {
          return other.name == "dp_replicate" || other.name == "dp_shard";
        })) {
      findings.add("dp", "stands for dp_replicate x dp_shard and cannot be given beside them");
    }
    product *= std::max<int64_t>(axis.size, 1);
  }
  if (findings.empty() && product != world_size) {
    findings.add(product_text(axes), fmt::format("the product is {}, but the world has {} ranks", product, world_size),
                 "the sizes of all axes must multiply to the number of ranks");
  }
  findings.throw_if_any("mesh");
}

}  // namespace

struct Mesh::State {
  World world;
  std::vector<Axis> axes;
  std::vector<std::string> places;    // hosts by rank, if they were asked for and there are several
  std::map<std::string, Comm> comms;  // by the names of the axes of size > 1, in the mesh's order, joined by "_"

  explicit State(const World& w) : world(w) {}

  int64_t stride(size_t axis) const {
    int64_t result = 1;
    for (size_t i = axis + 1; i < axes.size(); ++i) result *= axes[i].size;
    return result;
  }
  int64_t coord(size_t axis, int world_rank) const { return world_rank / stride(axis) % axes[axis].size; }
  std::vector<bool> select(const std::vector<std::string_view>& names) const;
  std::vector<int> members(const std::vector<bool>& selected, int of) const;
  void warn_of_crossing();
  Comm comm(const std::vector<bool>& selected);
};

// Which axes the names mean. Unlisted known axes have size 1 and select nothing.
std::vector<bool> Mesh::State::select(const std::vector<std::string_view>& names) const {
  std::vector<bool> selected(axes.size(), false);
  for (const std::string_view name : names) {
    bool found = false;
    for (size_t i = 0; i < axes.size(); ++i) {
      const bool part_of_dp = name == "dp" && (axes[i].name == "dp_replicate" || axes[i].name == "dp_shard");
      if (axes[i].name == name || part_of_dp) selected[i] = found = true;
    }
    if (!found && std::find(std::begin(kKnownAxes), std::end(kKnownAxes), name) == std::end(kKnownAxes)) {
      throw ConfigError(fmt::format("mesh has no axis '{}'; its axes: {} (and of size 1: {})", name,
                                    fmt::join(names_of(axes), ", "), fmt::join(kKnownAxes, ", ")));
    }
  }
  return selected;
}

// The world ranks that differ from rank `of` on the selected axes only, outermost axis slowest.
std::vector<int> Mesh::State::members(const std::vector<bool>& selected, int of) const {
  std::vector<int> ranks;
  for (int r = 0; r < world.size(); ++r) {
    bool same = true;
    for (size_t i = 0; i < axes.size(); ++i) same = same && (selected[i] || coord(i, r) == coord(i, of));
    if (same) ranks.push_back(r);
  }
  return ranks;
}

// Collective when an axis asks for it. Everybody knows all places then, and rank 0 speaks for all.
void Mesh::State::warn_of_crossing() {
  for (size_t i = 0; i < axes.size(); ++i) {
    const bool within_node = std::find(std::begin(kNodeAxes), std::end(kNodeAxes), axes[i].name) != std::end(kNodeAxes);
    if (!within_node || axes[i].size == 1) continue;
    if (places.empty()) places = detail::places_of_ranks(world.comm());
    if (places.empty() || world.rank() != 0) continue;
    std::vector<bool> selected(axes.size(), false);
    selected[i] = true;
    std::vector<std::vector<int>> groups;
    for (int r = 0; r < world.size(); ++r) {
      if (coord(i, r) == 0) groups.push_back(members(selected, r));
    }
    if (const auto text = detail::crossing_text(product_text(axes), axes[i].name, groups, places)) log(LogLevel::warning, *text);
  }
}

Comm Mesh::State::comm(const std::vector<bool>& selected) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (selected[i] && axes[i].size > 1) parts.push_back(axes[i].name);
  }
  const std::string name = fmt::format("{}", fmt::join(parts, "_"));
  const auto known = comms.find(name);
  if (known != comms.end()) return known->second;
  const auto& world_state = *world.comm().state();
  const Comm made(detail::make_group(world_state.core, members(selected, world.rank()), parts.empty() ? "self" : name, world_state.timeout));
  comms.emplace(name, made);
  return made;
}

Mesh::Mesh(const World& world, std::vector<Axis> axes) : state_(std::make_shared<State>(world)) {
  check_axes(axes, world.size());
  state_->axes = std::move(axes);
  for (const Axis& axis : state_->axes) (*this)[axis.name];
  state_->warn_of_crossing();
}

Comm Mesh::operator[](std::string_view axis) const { return state_->comm(state_->select({axis})); }

Comm Mesh::operator[](std::initializer_list<std::string_view> axes) const {
  return state_->comm(state_->select({axes.begin(), axes.end()}));
}

int64_t Mesh::size(std::string_view axis) const {
  const auto selected = state_->select({axis});
  int64_t result = 1;
  for (size_t i = 0; i < selected.size(); ++i) result *= selected[i] ? state_->axes[i].size : 1;
  return result;
}

int64_t Mesh::coord(std::string_view axis) const {
  const auto selected = state_->select({axis});
  int64_t result = 0;
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i]) result = result * state_->axes[i].size + state_->coord(i, state_->world.rank());
  }
  return result;
}

const std::vector<Axis>& Mesh::axes() const { return state_->axes; }

std::string Mesh::describe() const {
  const auto& axes = state_->axes;
  std::string text = fmt::format("{} ({} rank{})\n", product_text(axes), state_->world.size(), state_->world.size() == 1 ? "" : "s");
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].size == 1) continue;
    std::vector<bool> one(axes.size(), false);
    one[i] = true;
    text += fmt::format("  {}: coord {}, ranks {}\n", axes[i].name, state_->coord(i, state_->world.rank()),
                        fmt::join(state_->members(one, state_->world.rank()), " "));
  }
  std::map<std::string, std::vector<size_t>> hosts;
  for (size_t rank = 0; rank < state_->places.size(); ++rank) hosts[state_->places[rank]].push_back(rank);
  for (const auto& [host, ranks] : hosts) text += fmt::format("  host {}: ranks {}\n", host, fmt::join(ranks, " "));
  return text;
}

}  // namespace weft
