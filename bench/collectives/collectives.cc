// Latency and bus bandwidth of the local back end and of gloo on this machine, beside what its memory allows, by nccl-tests'
// definitions: bytes is the larger of input and output, busbw = bytes / time x the operation's factor. All in one run: every
// cell is measured on all back ends within the same second. Ranks are processes: the program starts itself once per rank.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <sched.h>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>

#include "bench/collectives/memory_limits.h"
#include "bench/support/own_ranks.h"
#include "weft/comm/world.h"

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

const std::vector<std::string> kOperations{"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                           "broadcast",  "send_recv",  "barrier"};

struct Options {
  std::vector<int> ranks{2, 4};
  std::vector<std::string> ops = kOperations;
  int64_t min_bytes = 4;
  int64_t max_bytes = int64_t{256} << 20;
  int64_t factor = 4;
  double seconds = 0.2;  // per cell
  bool pin = false;
  std::string json;
};

/// One call of `op` on `bytes` bytes of fp32, until its input may be overwritten.
std::function<void()> call_of(const weft::Comm& comm, const std::string& op, int64_t bytes, bool shared) {
  const int64_t n = comm.size();
  const int64_t whole = std::max<int64_t>(bytes / 4, 1), part = std::max<int64_t>(whole / n, 1);
  const auto tensor = [&](int64_t count) {
    return shared ? comm.allocate({count}, at::kFloat).zero_() : at::zeros({count}, at::kFloat);
  };
  if (op == "barrier") return [comm] { comm.barrier(); };
  if (op == "all_reduce") return [comm, t = tensor(whole)] { comm.all_reduce(t).released(); };
  if (op == "broadcast") return [comm, t = tensor(whole)] { comm.broadcast(t, 0).released(); };
  if (op == "all_gather") return [comm, in = tensor(part), out = tensor(part * n)] { comm.all_gather(out, in).released(); };
  if (op == "reduce_scatter") {
    return [comm, in = tensor(part * n), out = tensor(part)] { comm.reduce_scatter(out, in).released(); };
  }
  if (op == "all_to_all") {
    return [comm, in = tensor(part * n), out = tensor(part * n)] { comm.all_to_all(out, in).released(); };
  }
  // Every rank sends to the next and receives from the one before.
  return [comm, in = tensor(whole), out = tensor(whole)] {
    const int size = comm.size(), me = comm.rank();
    weft::Work sent = comm.send(in, (me + 1) % size);
    comm.recv(out, (me + size - 1) % size).wait();
    sent.released();
  };
}

double slowest(const weft::Comm& comm, double seconds) {
  const at::Tensor time = at::full({1}, seconds, at::kDouble);
  comm.all_reduce(time, weft::ReduceOp::max).wait();
  return *time.const_data_ptr<double>();
}

/// Seconds of a call: of each batch the slowest rank's mean, of these the median and the least.
struct Measured {
  double median = 0, least = 0;
  int64_t calls = 0;
};

Measured measure(const weft::Comm& comm, const std::function<void()>& body, double budget) {
  constexpr int kBatches = 7;
  constexpr int64_t kMostCalls = 10'000'000;
  const auto timed = [&](int64_t calls) {
    comm.barrier();
    const auto start = Clock::now();
    for (int64_t i = 0; i < calls; ++i) body();
    return slowest(comm, std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(calls));
  };
  body();
  const double estimate = timed(2);  // the same on all ranks, so that all make the same number of calls
  const int64_t each = std::clamp<int64_t>(static_cast<int64_t>(budget / kBatches / estimate), 1, kMostCalls);
  std::vector<double> times;
  for (int b = 0; b < kBatches; ++b) times.push_back(timed(each));
  std::sort(times.begin(), times.end());
  return {times[kBatches / 2], times[0], each * kBatches};
}

/// Binds this thread to the rank's core. After the worlds are made: they count the cores that a rank may use.
void pin_to_a_core(int rank) {
  cpu_set_t usable, mine;
  CPU_ZERO(&usable);
  CPU_ZERO(&mine);
  ::sched_getaffinity(0, sizeof usable, &usable);
  int left = rank % CPU_COUNT(&usable);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable) || left-- > 0) continue;
    CPU_SET(core, &mine);
    break;
  }
  ::sched_setaffinity(0, sizeof mine, &mine);
}

void run_rank(const Options& options, const std::string& result_file) {
  const auto timeout = std::chrono::minutes(5);
  const auto local = weft::World::init({.backend = weft::BackendKind::local, .timeout = timeout});
  const auto gloo = weft::World::init({.backend = weft::BackendKind::gloo, .timeout = timeout});
  const int n = local.size();
  if (options.pin) pin_to_a_core(local.rank());
  struct Way {
    const char* name;
    const weft::Comm& comm;
    bool shared;
  };
  const Way ways[] = {{"shared", local.comm(), true}, {"private", local.comm(), false}, {"gloo", gloo.comm(), false}};
  std::ofstream result;
  if (local.rank() == 0) result.open(result_file);
  for (const std::string& op : options.ops) {
    for (int64_t bytes = options.min_bytes; bytes <= options.max_bytes; bytes *= options.factor) {
      for (const Way& way : ways) {
        const Measured m = measure(way.comm, call_of(way.comm, op, bytes, way.shared), options.seconds);
        const double busbw = static_cast<double>(bytes) / m.median * weft::bench::bus_factor(op, n) / 1e9;
        if (!result.is_open()) continue;
        result << Json{{"ranks", n}, {"op", op}, {"bytes", op == "barrier" ? 0 : bytes}, {"backend", way.name},
                       {"us_median", m.median * 1e6}, {"us_min", m.least * 1e6},
                       {"busbw_gb_s", op == "barrier" ? 0 : busbw}, {"calls", m.calls}} << std::endl;
      }
      if (op == "barrier") break;
    }
  }
}

/// Lines of one cell stand together: shared, private, gloo.
void print_table(const std::vector<Json>& lines, std::optional<double> hop_ns) {
  if (hop_ns) fmt::print("a cache line goes from core to core in {:.0f} ns\n", *hop_ns);
  fmt::print("us: median of a call; GB/s: bus bandwidth; limit: what the cores can copy and add\n\n");
  fmt::print("{:>5} {:<14} {:>9} | {:>20} | {:>20} | {:>20} | {:>6} | {:>11}\n", "", "", "", "local, shared buffers",
             "local, private", "gloo", "limit", "shared/gloo");
  fmt::print("{:>5} {:<14} {:>9} | {:>11} {:>8} | {:>11} {:>8} | {:>11} {:>8} | {:>6} | {:>11}\n", "ranks", "operation",
             "bytes", "us", "GB/s", "us", "GB/s", "us", "GB/s", "GB/s", "speed");
  for (size_t i = 0; i + 2 < lines.size(); i += 3) {
    const Json& first = lines[i];
    fmt::print("{:>5} {:<14} {:>9}", first["ranks"].get<int>(), first["op"].get<std::string>(), first["bytes"].get<int64_t>());
    for (size_t way = 0; way < 3; ++way) {
      fmt::print(" | {:>11.2f} {:>8.3f}", lines[i + way]["us_median"].get<double>(), lines[i + way]["busbw_gb_s"].get<double>());
    }
    const std::string limit = first.contains("limit_gb_s") ? fmt::format("{:.2f}", first["limit_gb_s"].get<double>()) : "-";
    fmt::print(" | {:>6} | {:>10.1f}x\n", limit, lines[i + 2]["us_median"].get<double>() / first["us_median"].get<double>());
  }
}

void run_all(const Options& options, const std::vector<std::string>& arguments) {
  std::vector<Json> lines;
  for (int ranks : options.ranks) {
    auto more = weft::bench::run_own_ranks(ranks, arguments);
    for (Json& line : more) {
      if (line["backend"] != "shared") continue;
      const auto limit = weft::bench::bus_limit(line["op"], line["bytes"], ranks);
      if (limit) line["limit_gb_s"] = *limit;
    }
    lines.insert(lines.end(), more.begin(), more.end());
  }
  const auto hop_ns = weft::bench::line_hop_ns();
  print_table(lines, hop_ns);
  if (options.json.empty()) return;
  Json report{{"line_hop_ns", hop_ns ? Json(*hop_ns) : Json()}, {"cells", lines}};
  std::ofstream(options.json) << report.dump(1) << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Latency and bus bandwidth of collectives: local back end, gloo, and the limit of this machine's memory");
  app.add_option("--ranks", options.ranks, "Numbers of ranks")->delimiter(',')->capture_default_str();
  app.add_option("--ops", options.ops, "Operations")->delimiter(',')->check(CLI::IsMember(kOperations))->capture_default_str();
  app.add_option("--min-bytes", options.min_bytes, "Smallest size")->transform(CLI::AsSizeValue(false))->capture_default_str();
  app.add_option("--max-bytes", options.max_bytes, "Largest size")->transform(CLI::AsSizeValue(false))->capture_default_str();
  app.add_option("--factor", options.factor, "From size to size")->check(CLI::Range(2, 1 << 20))->capture_default_str();
  app.add_option("--seconds", options.seconds, "Time of a cell")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--pin", options.pin, "Bind rank R to the R-th core: the kernel may leave ranks that yield to each other on one");
  app.add_option("--json", options.json, "Also write the figures to this file");
  app.footer("Example:\n  bench_collectives --ranks 2 --ops all_reduce --min-bytes 4 --max-bytes 64MiB --json out.json");
  CLI11_PARSE(app, argc, argv);
  try {
    if (const auto result_file = weft::bench::result_file()) {
      run_rank(options, *result_file);
    } else {
      run_all(options, {argv + 1, argv + argc});
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
