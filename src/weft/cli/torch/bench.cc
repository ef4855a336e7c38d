// weft bench calibrate: measures this machine into a file that the planner reads (--machine FILE.toml).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "weft/cli/torch/commands.h"
#include "weft/comm/world.h"
#include "weft/config/machine_file.h"
#include "weft/core/json.h"
#include "weft/machine/local.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/plan/estimate.h"
#include "weft/train/prediction.h"

namespace weft::cli {
namespace {

struct Options {
  std::string out = "machine.toml";
  double seconds = 0.5;
  bool json = false;
};

/// Seconds of one call: the median of as many as fit into `seconds`, at least five, after one that is not counted.
double measure(double seconds, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  call();
  std::vector<double> times;
  const auto start = Clock::now();
  constexpr size_t kLeast = 5;
  while (times.size() < kLeast || std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    const auto before = Clock::now();
    call();
    times.push_back(std::chrono::duration<double>(Clock::now() - before).count());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

/// FLOP/s of the fastest of some square products.
double matmul_rate(at::ScalarType dtype, double seconds) {
  double best = 0;
  for (int64_t size : {512, 1024, 1536}) {
    const at::Tensor a = at::randn({size, size}).to(dtype), b = at::randn({size, size}).to(dtype);
    at::Tensor out = at::empty({size, size}, a.options());
    const double flops = 2.0 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
    best = std::max(best, flops / measure(seconds / 3, [&] { at::mm_out(out, a, b); }));
  }
  return best;
}

/// Bytes read and written per second by a copy that no cache holds.
double copy_rate(double seconds) {
  constexpr int64_t kElements = 32 << 20;
  const at::Tensor from = at::ones({kElements});
  at::Tensor to = at::empty({kElements});
  return 2.0 * 4 * kElements / measure(seconds, [&] { to.copy_(from); });
}

double operation_time(double seconds) {
  constexpr int kBatch = 100;
  at::Tensor small = at::zeros({16});
  return measure(seconds, [&] { for (int i = 0; i < kBatch; ++i) small.add_(1.0); }) / kBatch;
}

/// nccl-tests' bus bandwidth of a large all-reduce; 0 with one rank.
double bus_rate(const Comm& comm, double seconds) {
  if (comm.size() == 1) return 0;
  constexpr int64_t kElements = 4 << 20;
  at::Tensor data = comm.allocate({kElements}, at::kFloat);
  data.zero_();
  // Every rank makes the same number of calls: a fixed one, from the time of a first round.
  constexpr int kRound = 10;
  const auto round = [&](int calls) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) comm.all_reduce(data).wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
  };
  at::Tensor pace = at::full({1}, round(kRound), at::kDouble);
  comm.all_reduce(pace, ReduceOp::max).wait();
  const double time = round(std::max(kRound, static_cast<int>(seconds / pace.item<double>())));
  const double n = comm.size();
  return 2 * (n - 1) / n * 4 * kElements / time;
}

/// The slowest rank's rates: what a job that waits for everybody gets.
void take_slowest(const Comm& comm, std::vector<double*> rates, double* time) {
  std::vector<double> values;
  for (double* rate : rates) values.push_back(*rate);
  values.push_back(-*time);
  at::Tensor all = at::tensor(values, at::kDouble);
  comm.all_reduce(all, ReduceOp::min).wait();
  for (size_t i = 0; i < rates.size(); ++i) *rates[i] = all[static_cast<int64_t>(i)].item<double>();
  *time = -all[static_cast<int64_t>(rates.size())].item<double>();
}

/// A whole training step takes longer than one measurement.
constexpr double kReferenceShare = 4;

Json to_json(const config::MachineFile& file, const std::string& path) {
  return {{"file", path}, {"name", file.name}, {"devices", file.devices}, {"cores", file.cores}, {"memory_gib", file.memory_gib}, {"memory_gbps", file.memory_gbps},
          {"matmul_fp32_gflops", file.matmul_fp32_gflops}, {"matmul_bf16_gflops", file.matmul_bf16_gflops}, {"link_gbps", file.link_gbps}, {"operation_us", file.operation_us},
          {"training_share_fp32", file.training_share_fp32}, {"training_share_bf16", file.training_share_bf16}, {"nic_gbits", file.nic_gbits}};
}

void calibrate(const Options& options) {
  install_cpu_allocator();  // as training does
  const World world = World::init();
  const machine::LocalComputer computer = machine::detect_local();
  config::MachineFile file;
  file.devices = world.local_size();
  file.cores = std::max<int64_t>(1, computer.cores / file.devices);
  at::set_num_threads(static_cast<int>(file.cores));
  file.name = fmt::format("{} ({} {})", computer.cpu.empty() ? "CPU" : computer.cpu, file.devices, file.devices == 1 ? "rank" : "ranks");
  file.memory_gib = computer.memory_gib / static_cast<double>(file.devices);
  // All ranks measure at once, because they share caches and memory when they train.
  world.comm().barrier();
  file.matmul_fp32_gflops = matmul_rate(at::kFloat, options.seconds) / 1e9;
  file.matmul_bf16_gflops = matmul_rate(at::kBFloat16, options.seconds) / 1e9;
  world.comm().barrier();
  file.memory_gbps = copy_rate(options.seconds) / 1e9;
  world.comm().barrier();
  file.operation_us = operation_time(options.seconds) * 1e6;
  file.link_gbps = bus_rate(world.comm(), options.seconds) / 1e9;
  take_slowest(world.comm(), {&file.matmul_fp32_gflops, &file.matmul_bf16_gflops, &file.memory_gbps}, &file.operation_us);
  const auto share = [&](const char* dtype) {
    const train::Reference step = train::measure_reference(world, dtype, kReferenceShare * options.seconds);
    return plan::step_time(train::plan_job(step.job, world.size(), config::machine_of(file)), {}).step / step.step_s;
  };
  const double fp32 = share("fp32"), bf16 = share("bf16");  // both of the rates alone
  file.training_share_fp32 = fp32;
  file.training_share_bf16 = bf16;
  if (world.rank() != 0) return;
  write_text(options.out, config::to_toml(file));
  if (options.json) {
    fmt::print("{}\n", to_json(file, options.out).dump(2));
    return;
  }
  fmt::print("{}: products {:.0f} GFLOP/s in fp32 and {:.0f} in bf16, memory {:.1f} GB/s, an operation {:.1f} us", file.name, file.matmul_fp32_gflops, file.matmul_bf16_gflops, file.memory_gbps, file.operation_us);
  fmt::print("{}\na training step reaches {:.0f}% of what these promise in fp32 and {:.0f}% in bf16", file.link_gbps > 0 ? fmt::format(", all-reduce {:.2f} GB/s", file.link_gbps) : "", 100 * file.training_share_fp32, 100 * file.training_share_bf16);
  fmt::print("\n{} written; plan with --machine {}\n", options.out, options.out);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  CLI::App* command = bench->add_subcommand("calibrate", "Products, memory, operations and all-reduce of this machine, into a file for the planner");
  auto options = std::make_shared<Options>();
  command->add_option("--out", options->out, "file to write")->capture_default_str();
  command->add_option("--seconds", options->seconds, "time of each measurement")->check(CLI::Range(0.01, 60.0))->capture_default_str();
  command->add_flag("--json", options->json, "print what was measured as one JSON object");
  command->footer("Under a launcher all ranks measure together, as they will train:\n  weft run -n 2 -- weft bench calibrate\n  weft estimate --machine machine.toml --devices 2 --precision fp32 ...");
  command->callback([options] { calibrate(*options); });
}

}  // namespace weft::cli
