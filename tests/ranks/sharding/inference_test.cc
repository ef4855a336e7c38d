// Inference beside training, in every dial position: snapshots, averaged weights, forwards without gradients.
#include <c10/core/InferenceMode.h>

#include <future>
#include <sstream>
#include <torch/nn/modules/batchnorm.h>
#include <unordered_map>

#include "tests/ranks/sharding/stack.h"
#include "weft/core/error.h"
#include "weft/optim/ema.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::on_threads;

constexpr int64_t kSteps = 6, kRows = 12, kSnapshotAfter = 3;
constexpr double kDecay = 0.7;

struct Position {
  int zero, ranks;
  int64_t dp_shard = 0;
  bool reshard = true;
};
const Position kPositions[] = {{0, 1}, {0, 3}, {1, 2}, {2, 3}, {3, 2}, {3, 3}, {3, 2, 0, false}, {1, 4, 2}, {3, 4, 2}};

std::string name_of(const Position& p) {
  return c10::str("zero ", p.zero, ", ", p.ranks, " ranks, dp_shard ", p.dp_shard, p.reshard ? "" : ", kept after forward");
}

/// What is measured beside training; empty where nothing is.
struct Beside {
  std::vector<double> losses;     // of training
  std::vector<double> no_grad, inference, averaged, snapshot;
  std::vector<NamedTensor> copy;  // at kSnapshotAfter
  std::vector<at::Tensor> weights, averages;
};

at::Tensor inputs_of(int64_t step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(11 + step);
  return torch::randn({kRows, 6}, generator, torch::kDouble);
}

double loss_of(testing::Stack& net, const at::Tensor& x) {
  return (net(x) - torch::sin(x.narrow(1, 0, 3) * 2)).square().mean().item<double>();
}

/// Evaluates a copy in a thread of its own, on another module, while `comm`'s ranks go on.
std::future<double> evaluate_aside(std::vector<NamedTensor> values) {
  return std::async(std::launch::async, [values = std::move(values)] {
    testing::Stack other = testing::make_stack();
    load_values(other, values);
    const c10::InferenceMode inference;
    return loss_of(other, inputs_of(99));
  });
}

Beside train(const Comm& comm, const DataParallelOptions& options, bool measure) {
  testing::Stack net = testing::make_stack();
  DataParallel dp(net, comm, options);
  const auto optimizer = testing::make_method(testing::Method::weft_adamw, dp);
  optim::Ema ema(dp, {.decay = kDecay});
  Beside result;
  std::future<double> aside;
  const at::Tensor probe = inputs_of(99);
  for (int64_t step = 0; step < kSteps; ++step) {
    const int64_t rows = kRows / comm.size();
    const at::Tensor x = inputs_of(step).narrow(0, comm.rank() * rows, rows);
    if (measure) {  // the very first forward, and more than one between two steps
      const c10::InferenceMode inference;
      result.inference.push_back(loss_of(net, probe));
    }
    const at::Tensor loss = (net(x) - torch::sin(x.narrow(1, 0, 3) * 2)).square().sum();
    scale_loss(loss, kRows, dp).backward();
    at::Tensor total = loss.detach().clone();
    comm.all_reduce(total).wait();
    result.losses.push_back(total.item<double>());
    optimizer->step();
    dp.zero_grad();
    ema.update();
    if (!measure) continue;
    result.averaged.push_back(ema.with_averages(dp, [&] {
      const at::NoGradGuard no_grad;
      return loss_of(net, probe);
    }));
    const at::NoGradGuard no_grad;
    result.no_grad.push_back(loss_of(net, probe));
    if (step + 1 == kSnapshotAfter) {
      result.copy = dp.snapshot();
      aside = evaluate_aside(result.copy);
    }
  }
  if (measure) result.snapshot.push_back(aside.get());
  for (const NamedTensor& t : dp.snapshot()) result.weights.push_back(t.tensor);
  ema.with_averages(dp, [&] {
    for (const NamedTensor& t : dp.snapshot()) result.averages.push_back(t.tensor);
  });
  return result;
}

DataParallelOptions options_of(const Position& p) {
  return {.sharding = sharding_of_zero(p.zero), .dp_shard = p.dp_shard, .reshard_after_forward = p.reshard};
}

/// The averages by their definition, from the weights after each step.
std::vector<at::Tensor> averages_by_hand() {
  testing::Stack net = testing::make_stack();
  DataParallel dp(net, Comm());
  const auto optimizer = testing::make_method(testing::Method::weft_adamw, dp);
  std::vector<at::Tensor> averages;
  for (const at::Tensor& p : net->parameters()) averages.push_back(p.detach().clone());
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor x = inputs_of(step);
    ((net(x) - torch::sin(x.narrow(1, 0, 3) * 2)).square().sum() / kRows).backward();
    optimizer->step();
    dp.zero_grad();
    const double decay = std::min(kDecay, (1.0 + static_cast<double>(step)) / (10.0 + static_cast<double>(step)));
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < averages.size(); ++i) {
      if (net->parameters()[i].requires_grad()) averages[i] = averages[i] * decay + net->parameters()[i] * (1 - decay);
    }
  }
  return averages;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-10 * std::abs(b[i])) << what << " at " << i;
}

void expect_near(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-10, 1e-12)) << what << " of parameter " << i;
}

TEST(BesideTraining, EveryPositionMeasuresTheOneRankModelAndTrainsAsIfNothingWasMeasured) {
  const Beside reference = train(Comm(), {}, true);
  EXPECT_LT(reference.averaged.back(), reference.averaged.front());
  EXPECT_GT(std::abs(reference.averaged.back() - reference.no_grad.back()), 1e-4 * reference.no_grad.back());
  EXPECT_EQ(reference.snapshot.front(), reference.no_grad[kSnapshotAfter - 1]) << "later steps do not reach the copy";
  expect_near(reference.averages, averages_by_hand(), "averages by hand");
  for (const Position& p : kPositions) {
    const std::string what = name_of(p);
    on_threads(p.ranks, [&](World& world) {
      const Beside measured = train(world.comm(), options_of(p), true);
      expect_near(measured.losses, reference.losses, what + ": losses");
      expect_near(measured.no_grad, reference.no_grad, what + ": NoGradGuard");
      expect_near(measured.inference, reference.inference, what + ": InferenceMode");
      expect_near(measured.averaged, reference.averaged, what + ": averaged weights");
      expect_near(measured.snapshot, reference.snapshot, what + ": snapshot in a thread");
      expect_near(measured.weights, reference.weights, what + ": weights");
      expect_near(measured.averages, reference.averages, what + ": averages");
      const Beside alone = train(world.comm(), options_of(p), false);
      EXPECT_EQ(measured.losses, alone.losses) << what;
      for (size_t i = 0; i < alone.weights.size(); ++i) EXPECT_TRUE(at::equal(measured.weights[i], alone.weights[i])) << what << ", " << i;
    });
  }
}

/// Tied weights, a frozen one, buffers of two kinds.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    first = register_module("first", Unit<torch::nn::Linear>(4, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    tied = register_parameter("tied", first->weight);
    fixed = register_parameter("fixed", torch::ones({3}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(first(x)); }
  Unit<torch::nn::Linear> first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor tied, fixed;
};
TORCH_MODULE(Odd);

TEST(Snapshot, HoldsEveryNameInMemoryOfItsOwnAndInTheDtypeAskedFor) {
  for (const int zero : {0, 1, 3}) {
    on_threads(2, [&](World& world) {
      Odd net, other;
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
      net(torch::ones({3, 4}) * (world.rank() + 1)).square().sum().backward();
      dp.continue_accumulation();  // there is no step
      const auto values = dp.snapshot(at::kBFloat16);
      ASSERT_EQ(values.size(), net->named_parameters().size() + net->named_buffers().size());
      {
        const auto full = dp.gather_full();
        for (const NamedTensor& v : values) {
          const at::Tensor* source = net->named_parameters().find(v.name);
          if (source == nullptr) source = net->named_buffers().find(v.name);
          ASSERT_NE(source, nullptr) << v.name;
          const auto dtype = source->is_floating_point() ? at::kBFloat16 : source->scalar_type();
          EXPECT_EQ(v.tensor.scalar_type(), dtype) << v.name;
          EXPECT_TRUE(at::equal(v.tensor, source->detach().to(dtype))) << v.name;
          EXPECT_FALSE(v.tensor.is_alias_of(*source)) << v.name;
          EXPECT_EQ(v.tensor.storage().nbytes(), v.tensor.nbytes()) << v.name;
        }
      }
      load_values(other, values);
      EXPECT_TRUE(at::equal(other->norm->running_mean, values[values.size() - 3].tensor.to(at::kFloat)));
      EXPECT_GT(other->norm->running_mean.abs().max().item<float>(), 0);
    });
  }
}

TEST(VisitFull, ShowsEveryNameOnceWhileOneUnitIsWhole) {
  for (const int zero : {0, 2, 3}) {
    on_threads(3, [&](World& world) {
      const testing::Stack net = testing::make_stack();
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
      const auto values = dp.snapshot();
      std::unordered_map<std::string, at::Tensor> expected;
      for (const NamedTensor& v : values) expected.emplace(v.name, v.tensor);
      size_t visits = 0, most = 0;
      dp.visit_full([&](const NamedTensor& p) {
        ++visits;
        EXPECT_TRUE(at::equal(p.tensor, expected.at(p.name))) << p.name;
        size_t whole = 0;
        for (const NamedTensor& other : dp.all_parameters()) {
          whole += other.tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;  // nothing throws
        }
        most = std::max(most, whole);
      });
      EXPECT_EQ(visits, dp.all_parameters().size());
      if (zero < 3) {
        EXPECT_EQ(most, visits);
      } else {
        EXPECT_LT(most, visits / 2) << "the whole model is there at once";
      }
    });
  }
}

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(Snapshot, ValuesThatDoNotFitAreAllNamed) {
  Odd net;
  const at::Tensor before = net->first->weight.detach().clone();
  std::vector<NamedTensor> values = DataParallel(net, Comm()).snapshot();
  ASSERT_EQ(values[0].name, "tied");
  values[0].name = "elsewhere";
  values[1].tensor = torch::ones({7});
  for (NamedTensor& v : values) v.tensor = v.tensor + 1;
  const std::string text = message_of([&] { load_values(net, values); });
  for (const char* part : {"tied", "elsewhere", "fixed", "[7]"}) EXPECT_THAT(text, HasSubstr(part));
  EXPECT_TRUE(at::equal(net->first->weight.detach(), before));
}

TEST(Ema, BreaksNoRuleSilently) {
  on_threads(2, [](World& world) {
    testing::Stack net = testing::make_stack();
    DataParallel dp(net, world.comm(), {.sharding = Sharding::parameters});
    EXPECT_THROW(optim::Ema(dp, {.decay = 1}), ConfigError);
    optim::Ema ema(dp);
    {
      const auto full = dp.gather_full();
      EXPECT_THAT(message_of([&] { ema.swap(dp); }), HasSubstr("unit 'in'"));
    }
    ema.swap(dp);
    EXPECT_THAT(message_of([&] { ema.update(); }), HasSubstr("swap()"));
    ema.swap(dp);
    ema.update();
    EXPECT_THAT(message_of([&] { ema.with_averages(dp, []() -> double { throw std::runtime_error("of mine"); }); }), HasSubstr("of mine"));
    EXPECT_FALSE(ema.swapped());
    std::stringstream file;
    torch::serialize::OutputArchive out;
    ema.save(out);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    optim::Ema other(dp, {.warmup = false});
    other.load(in);
    EXPECT_EQ(other.updates(), 1);
    torch::nn::Linear small(2, 2);
    DataParallel small_dp(small, world.comm());
    optim::Ema wrong(small_dp);
    EXPECT_THAT(message_of([&] { wrong.load(in); }), HasSubstr("weight"));
  });
}

/// 16-bit weights come back bit by bit although their averages are fp32.
TEST(Ema, AveragesOf16BitWeightsAreKeptInFp32) {
  for (const int zero : {0, 2, 3}) {
    on_threads(2, [&](World& world) {
      testing::Stack net = testing::make_stack();
      net->to(at::kBFloat16);
      DataParallel dp(net, world.comm(), {.sharding = sharding_of_zero(zero)});
      optim::Ema ema(dp, {.decay = 0.999, .warmup = false});
      dp.write_shards([&] {
        const at::NoGradGuard no_grad;
        for (const NamedTensor& s : dp.shards()) s.tensor.fill_(1);
      });
      for (int i = 0; i < 20; ++i) ema.update();
      const auto before = dp.snapshot();
      for (size_t i = 0; i < dp.shards().size(); ++i) {
        const at::Tensor average = ema.averages()[i].tensor;
        EXPECT_EQ(average.scalar_type(), at::kFloat);
        if (dp.shards()[i].name != "out.bias" || average.numel() == 0) continue;
        // 20 steps of 1/1000 towards 1, each less than bf16 can tell: 0.98 of the way is left.
        const at::Tensor start = testing::make_stack()->out->bias.detach().to(at::kBFloat16).to(at::kFloat);
        const double left = (1 - average[0].item<double>()) / (1 - start[0].item<double>());
        EXPECT_NEAR(left, std::pow(0.999, 20), 1e-5);
      }
      const auto averaged = ema.with_averages(dp, [&] { return dp.snapshot(); });
      const auto after = dp.snapshot();
      bool moved = false;
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(before[i].tensor, after[i].tensor)) << before[i].name;
        moved = moved || !at::equal(before[i].tensor, averaged[i].tensor);
      }
      EXPECT_TRUE(moved);
    });
  }
}

}  // namespace
}  // namespace weft
