// Optimizer state in files gives the numbers of state in memory, and what can go wrong with a disk is said.
#include "weft/optim/offload_options.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <sstream>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include "tests/ranks/sharding/stack.h"
#include "tests/support/pairwise.h"
#include "tests/support/temp_dir.h"
#include "weft/core/error.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/optim/adam8bit.h"
#include "weft/optim/lion.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using optim::ElementwiseOptimizer;
using optim::OffloadOptions;
using testing::on_threads;
using testing::TempDir;

enum class Kind { adamw, sgd, plain_sgd, lion, rounded, bf16_moments };
constexpr Kind kKinds[] = {Kind::adamw, Kind::sgd, Kind::plain_sgd, Kind::lion, Kind::rounded, Kind::bf16_moments};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kHalf};

std::unique_ptr<ElementwiseOptimizer> make_optimizer(Kind kind, const DataParallel& dp) {
  if (kind == Kind::sgd || kind == Kind::plain_sgd) {
    const auto options = optim::SGDOptions(0.05).momentum(kind == Kind::sgd ? 0.9 : 0).weight_decay(0.1);
    return std::make_unique<optim::SGD>(optim::decay_matrices_only(dp, options), options);
  }
  if (kind == Kind::lion) return std::make_unique<optim::Lion>(optim::decay_matrices_only(dp, optim::LionOptions(1e-2)));
  const auto options = optim::AdamWOptions(3e-2).betas({0.9, 0.99}).weight_decay(0.1);
  auto adamw = std::make_unique<optim::AdamW>(optim::decay_matrices_only(dp, options), options);
  if (kind == Kind::rounded) adamw->round_stochastically(7, dp.shards());
  if (kind == Kind::bf16_moments) adamw->keep_moments_in_bf16();
  return adamw;
}

struct Trained {
  std::vector<double> losses;
  std::vector<NamedTensor> weights;
};

struct Cell {
  int zero, ranks;
  at::ScalarType dtype = at::kFloat;
  Kind kind = Kind::adamw;
  int64_t micro_steps = 1;
  int64_t dp_shard = 0;
  Reshard reshard = true;
  bool parameters_on_host = false;
};

/// A file through buffers that are smaller than the larger parameters' state; null: memory.
const OffloadOptions* in_file(const TempDir& dir) {
  static OffloadOptions options;
  options = {.dir = dir.path(), .buffer_bytes = 640, .buffers = 3};
  return &options;
}

/// `between`: called after the third of six steps, when everything is as a checkpoint would find it.
Trained train(const Comm& comm, const Cell& cell, const OffloadOptions* offload,
          const std::function<void(std::unique_ptr<ElementwiseOptimizer>&, const DataParallel&)>& between = {}) {
  testing::Stack net = testing::make_stack();
  net->to(cell.dtype);
  DataParallel dp(net, comm, {.sharding = sharding_of_zero(cell.zero), .dp_shard = cell.dp_shard, .reshard_after_forward = cell.reshard,
                              .offload_parameters = cell.parameters_on_host});
  auto optimizer = make_optimizer(cell.kind, dp);
  if (offload != nullptr) optimizer->offload(*offload);
  std::optional<optim::LossScaler> scaler;
  if (cell.dtype == at::kHalf) scaler.emplace(optim::LossScalerOptions{.initial = 256});
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const int64_t steps = 6, batch = 12, rows = batch / cell.micro_steps / comm.size();
  const at::Tensor inputs = torch::randn({batch * steps, 6}, generator, torch::kDouble).to(cell.dtype);
  Trained run;
  for (int64_t step = 0; step < steps; ++step) {
    double total = 0;
    for (int64_t k = 0; k < cell.micro_steps; ++k) {
      dp.sync(k + 1 == cell.micro_steps);
      const at::Tensor x = inputs.narrow(0, step * batch + (k * comm.size() + comm.rank()) * rows, rows);
      const at::Tensor loss = (net(x, /*use_c=*/step != 1) - torch::sin(x.narrow(1, 0, 3) * 2)).to(at::kFloat).square().sum();
      const at::Tensor mean = scale_loss(loss, batch, dp);
      (scaler ? scaler->scale(mean) : mean).backward();
      total += loss.item<double>();
    }
    run.losses.push_back(total);
    if (scaler && !scaler->unscale(dp)) ADD_FAILURE() << "fp16 overflowed";
    EXPECT_GT(dp.clip_grad_norm(0.5), 0);
    optimizer->step();
    dp.zero_grad();
    if (step == 2 && between) between(optimizer, dp);
  }
  run.weights = dp.snapshot();
  return run;
}

void expect_equal(const Trained& a, const Trained& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_NE(a.losses.front(), a.losses.back()) << what;
  ASSERT_EQ(a.weights.size(), b.weights.size()) << what;
  for (size_t i = 0; i < a.weights.size(); ++i) EXPECT_TRUE(at::equal(a.weights[i].tensor, b.weights[i].tensor)) << what << ", " << a.weights[i].name;
}

TEST(Offload, NumbersAreThoseOfStateInMemory) {
  const TempDir dir;
  std::vector<Cell> cells;
  for (const auto& c : testing::pairwise({4, 3, std::size(kDtypes), std::size(kKinds), 2})) {
    const Kind kind = kKinds[c[3]];
    // Rounding is for bf16 weights.
    const auto dtype = kind == Kind::rounded ? at::kBFloat16 : kDtypes[c[2]];
    cells.push_back({static_cast<int>(c[0]), static_cast<int>(c[1]) + 1, dtype, kind, c[4] == 0 ? 1 : 2});
  }
  for (const Cell& cell : cells) {
    const std::string what = c10::str("zero ", cell.zero, ", ", cell.ranks, " ranks, ", cell.dtype, ", optimizer ", static_cast<int>(cell.kind),
                                      ", ", cell.micro_steps, " micro-steps");
    const OffloadOptions* file = in_file(dir);
    on_threads(cell.ranks, [&](World& world) {
      expect_equal(train(world.comm(), cell, file), train(world.comm(), cell, nullptr), what);
    });
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

/// Saved from a file or from memory, loaded into either.
// State on the host or in files, and parameters on the host, in replicas of shards and wherever parameters are between uses.
TEST(Offload, NumbersAreThoseInReplicasAndWithParametersOnTheHost) {
  const TempDir dir;
  OffloadOptions host = *in_file(dir);
  host.to = OffloadOptions::To::cpu;
  std::vector<Cell> cells;
  for (const int zero : {1, 2, 3}) cells.push_back({.zero = zero, .ranks = 4, .dtype = zero == 2 ? at::kBFloat16 : at::kFloat, .dp_shard = 2});
  cells.push_back({.zero = 3, .ranks = 3, .dtype = at::kBFloat16, .micro_steps = 2});
  cells.push_back({.zero = 3, .ranks = 3, .kind = Kind::sgd, .reshard = false});
  cells.push_back({.zero = 3, .ranks = 4, .dtype = at::kDouble, .kind = Kind::lion, .reshard = 2});
  cells.push_back({.zero = 3, .ranks = 1, .dtype = at::kDouble});
  for (const Cell& cell : cells) {
    const std::string what = c10::str("zero ", cell.zero, ", ", cell.ranks, " ranks, replicas of ", cell.dp_shard, ", ", cell.dtype);
    on_threads(cell.ranks, [&](World& world) {
      const Trained plain = train(world.comm(), cell, nullptr);
      for (const OffloadOptions* to : {static_cast<const OffloadOptions*>(&host), in_file(dir)}) {
        Cell away = cell;
        away.parameters_on_host = cell.zero == 3;
        expect_equal(train(world.comm(), away, to), plain, what + (to == &host ? " on the host" : " in a file"));
      }
    });
  }
}

TEST(Offload, ArchivesAreThoseOfStateInMemory) {
  const TempDir dir;
  const OffloadOptions* file = in_file(dir);
  for (const Cell& cell : {Cell{0, 1, at::kBFloat16}, {3, 2, at::kBFloat16}, {1, 3, at::kFloat, Kind::sgd}, {2, 2, at::kFloat, Kind::lion}}) {
    on_threads(cell.ranks, [&](World& world) {
      const Trained unbroken = train(world.comm(), cell, nullptr);
      for (const OffloadOptions* before : {file, static_cast<const OffloadOptions*>(nullptr)}) {
        for (const OffloadOptions* after : {file, static_cast<const OffloadOptions*>(nullptr)}) {
          if (before == nullptr && after == nullptr) continue;
          const auto replace = [&](std::unique_ptr<ElementwiseOptimizer>& optimizer, const DataParallel& dp) {
            std::stringstream archive;
            torch::save(*optimizer, archive);
            optimizer = make_optimizer(cell.kind, dp);
            if (after != nullptr) optimizer->offload(*after);
            torch::load(*optimizer, archive);
          };
          expect_equal(train(world.comm(), cell, before, replace), unbroken, "saved and loaded");
        }
      }
    });
  }
}

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError";
}

/// 8-bit moments have a scale per block of 256 elements: pieces are cut between blocks, and the last block is a short one.
TEST(Offload, BlocksOf8BitMomentsAreNotCut) {
  const TempDir dir;
  const auto train = [&](bool in_file, bool archive) {
    const at::Tensor weight = torch::linspace(-1, 1, 10'001).to(at::kBFloat16).requires_grad_();
    auto optimizer = std::make_unique<optim::Adam8bit>(std::vector{optim::OptimizerParamGroup({weight})}, optim::AdamWOptions(1e-2));
    // Three blocks of codes, scales and masters to a piece.
    const OffloadOptions options{.dir = dir.path(), .buffer_bytes = 5000, .buffers = 4};
    if (in_file) optimizer->offload(options);
    for (int step = 0; step < 4; ++step) {
      weight.mutable_grad() = torch::cos(torch::arange(10'001) * (step + 1)).to(at::kBFloat16);
      optimizer->step();
      if (!archive || step != 1) continue;
      std::stringstream file;
      torch::save(*optimizer, file);
      optimizer = std::make_unique<optim::Adam8bit>(std::vector{optim::OptimizerParamGroup({weight})}, optim::AdamWOptions(1e-2));
      if (in_file) optimizer->offload(options);
      torch::load(*optimizer, file);
    }
    return weight.detach();
  };
  const at::Tensor memory = train(false, false);
  EXPECT_TRUE(at::equal(train(true, false), memory));
  EXPECT_TRUE(at::equal(train(true, true), memory));
  EXPECT_GT((memory.to(at::kFloat) - torch::linspace(-1, 1, 10'001)).abs().max().item<double>(), 1e-2);
}

// The state of a parameter of 1000 elements, in pieces.
struct Single {
  explicit Single(const OffloadOptions& options, const memory::FileCalls& calls = memory::FileCalls::system()) {
    weight.mutable_grad() = torch::ones({1000});
    optimizer.offload(options, calls);
  }
  at::Tensor weight = torch::zeros({1000}).requires_grad_();
  optim::AdamW optimizer{{optim::OptimizerParamGroup({weight})}};
};

TEST(Offload, ADiskThatFailsInMidRunEndsItWithTheOffset) {
  const TempDir dir;
  const OffloadOptions options{.dir = dir.path(), .buffer_bytes = 1024, .buffers = 3, .what = "the state of rank 5"};
  static std::atomic<bool> fails;
  fails = false;
  memory::FileCalls flips = memory::FileCalls::system(), refuses = flips;
  flips.read = [](int file, void* to, size_t bytes, off_t offset) {
    const ssize_t got = ::pread(file, to, bytes, offset);
    if (fails && offset == 2048) static_cast<char*>(to)[0] ^= 1;
    return got;
  };
  refuses.write = [](int file, const void* from, size_t bytes, off_t offset) -> ssize_t {
    return fails && offset == 2048 ? (errno = EIO, -1) : ::pwrite(file, from, bytes, offset);
  };
  for (const auto& [calls, text] : {std::pair{flips, "checksum"}, {refuses, "Input/output error"}}) {
    fails = false;
    Single one(options, calls);
    one.optimizer.step();
    one.optimizer.step();
    fails = true;
    // A write that fails after the step is seen by the next.
    const std::string found = message_of([&] { one.optimizer.step(), one.optimizer.step(); });
    EXPECT_THAT(found, AllOf(HasSubstr(text), HasSubstr("offset 2048"), HasSubstr(dir.path()), HasSubstr("the state of rank 5")));
    fails = false;
    EXPECT_THAT(message_of([&] { one.optimizer.step(); }), HasSubstr("was lost in an earlier step"));
    std::stringstream archive;
    EXPECT_THAT(message_of([&] { torch::save(one.optimizer, archive); }), HasSubstr("was lost in an earlier step"));
  }
}

TEST(Offload, WhatDoesNotFitIsSaidBeforeTheFirstStep) {
  const TempDir dir;
  const auto error = [](const OffloadOptions& options) { return message_of([&] { Single one(options); }); };
  EXPECT_THAT(error({.dir = dir / "missing"}), HasSubstr("offload.dir"));
  EXPECT_THAT(error({.dir = dir.path(), .buffer_bytes = 1024, .buffers = 2}), HasSubstr("at least 3 buffers"));
  EXPECT_THAT(error({.dir = dir.path(), .buffer_bytes = 100}), HasSubstr("offload.buffer_mb"));
  memory::FileCalls full = memory::FileCalls::system();
  full.reserve = [](int, off_t, off_t) { return ENOSPC; };
  EXPECT_THAT(message_of([&] { Single one({.dir = dir.path()}, full); }), AllOf(HasSubstr("it needs 7.88 KiB"), HasSubstr("are free"), HasSubstr("Nothing was written")));
  Single one({.dir = dir.path()});
  one.optimizer.add_param_group(optim::OptimizerParamGroup({torch::zeros({3}).requires_grad_()}));
  EXPECT_THAT(message_of([&] { one.optimizer.step(); }), HasSubstr("Call offload() last"));
  optim::AdamW twice({optim::OptimizerParamGroup({one.weight})});
  twice.offload({.dir = dir.path()});
  EXPECT_THAT(message_of([&] { twice.offload({.dir = dir.path()}); }), HasSubstr("offload()"));
  twice.step();
  optim::AdamW late({optim::OptimizerParamGroup({one.weight})});
  late.step();
  EXPECT_THAT(message_of([&] { late.offload({.dir = dir.path()}); }), HasSubstr("offload()"));
}

TEST(Offload, ParametersThatAreKeptWholeAreNotOnTheHost) {
  on_threads(2, [](World& world) {
    for (const Sharding sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
      testing::Stack net = testing::make_stack();
      const DataParallelOptions options{.sharding = sharding, .offload_parameters = true};
      EXPECT_THAT(message_of([&] { DataParallel dp(net, world.comm(), options); }), AllOf(HasSubstr("offload_parameters: true with zero = "), HasSubstr("zero = 3")));
    }
    // One Unit whose parameters are sharded is enough.
    testing::Stack net = testing::make_stack();
    DataParallelOptions some{.sharding = Sharding::gradients, .offload_parameters = true};
    some.units = {{.units = "a", .sharding = Sharding::parameters}};
    EXPECT_NO_THROW(DataParallel(net, world.comm(), some));
  });
}

// Gradients 1, 2, 3 of three micro-steps: 6, with the norm of 6.
TEST(Offload, AccumulationCountsEveryMicroStep) {
  const TempDir dir;
  for (const int zero : {0, 1, 2, 3}) {
    on_threads(2, [&](World& world) {
      Unit<torch::nn::Linear> net(torch::nn::LinearOptions(4, 1).bias(false));
      DataParallel dp(net.ptr(), world.comm(), {.sharding = sharding_of_zero(zero)});
      const auto before = dp.snapshot();
      optim::SGD optimizer(optim::decay_matrices_only(dp, optim::SGDOptions(1).momentum(0.5)), optim::SGDOptions(1));
      optimizer.offload({.dir = dir.path()});
      for (int k = 1; k <= 3; ++k) {
        dp.sync(k == 3);
        net(torch::full({1, 4}, static_cast<double>(k))).sum().backward();
      }
      EXPECT_NEAR(dp.grad_norm(), 12, 1e-5);
      optimizer.step();
      EXPECT_TRUE(at::allclose(dp.snapshot()[0].tensor, before[0].tensor - 6));
    });
  }
}

/// bf16 weights and gradients: 4 of 16 bytes per parameter stay in memory, and the buffers.
std::string count_states(World& world, const std::string& argument) {
  install_cpu_allocator();
  using memory::Category;
  const TempDir dir;
  constexpr int64_t kSide = 512;
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) net->push_back(Unit<torch::nn::Linear>(torch::nn::LinearOptions(kSide, kSide).bias(false)));
  net->to(at::kBFloat16);
  const memory::Usage start = memory::usage();
  const int zero = std::stoi(argument);
  DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero), .gradient_dtype = at::kBFloat16});
  optim::AdamW optimizer(optim::decay_matrices_only(dp, optim::AdamWOptions(1e-3)));
  const OffloadOptions options{.dir = dir.path(), .buffer_bytes = 1 << 18, .buffers = 4};
  optimizer.offload(options);
  const int64_t parameters = 4 * kSide * kSide, share = parameters / (zero > 0 ? world.size() : 1);
  for (int step = 0; step < 3; ++step) {
    net->forward(torch::ones({2, kSide}, at::kBFloat16)).to(at::kFloat).square().sum().backward();
    memory::reset_peak();
    optimizer.step();
    dp.zero_grad();
    EXPECT_EQ(memory::usage().peak_by(Category::optimizer), optimizer.offload_use()->buffer_bytes) << "zero " << zero;
  }
  EXPECT_LE(optimizer.offload_use()->buffer_bytes, 4 << 18);
  EXPECT_GT(optimizer.offload_use()->buffer_bytes, 4 * 250'000);
  EXPECT_NEAR(static_cast<double>(optimizer.offload_use()->file_bytes), 12.0 * static_cast<double>(share), 0.01 * 12 * static_cast<double>(share));
  EXPECT_EQ(optimizer.offload_use()->disk.bytes_read, 2 * 12 * share) << "the first update has nothing to read";
  // Weights 2, gradients 2, shared out as the position says; besides those at most 3 pooled gradients and flags of a few bytes.
  const int64_t group = 2 * kSide * kSide;
  EXPECT_LE(memory::usage().live - start.live - optimizer.offload_use()->buffer_bytes, 4 * parameters / (zero == 3 ? 2 : 1) + (zero == 3 ? 3 * group : 0) + 4096);
  return {};
}
const testing::RankBody kCountStates("offload_states", count_states);

TEST(Offload, LeavesNothingOfTheStateInMemoryButTheBuffers) {
  for (const char* zero : {"0", "1", "3"}) {
    for (const auto& rank : testing::on_processes(2, "offload_states", zero)) EXPECT_EQ(rank.exit_code, 0) << rank.result;
  }
}

}  // namespace
}  // namespace weft
