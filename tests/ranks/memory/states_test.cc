// Bytes of model states of the trainer, by category, against the table in docs/memory.md: 16 bytes per parameter in fp32,
// 18 in bf16 with fp32 gradients and master weights (ZeRO: Memory Optimizations, Rajbhandari et al. 2020, section 3.1; Megatron-LM's
// distributed optimizer documentation for 18). Ranks are processes, as accounts are.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"
#include "weft/config/check.h"
#include "weft/data/token_file.h"
#include "weft/memory/cpu_allocator.h"
#include "weft/model/spec.h"
#include "weft/train/trainer.h"

namespace weft {
namespace {

using memory::Category;

config::RunConfig configuration(const std::string& dir, const std::string& dtype, const std::string& gradient,
                                int64_t hidden, int64_t zero) {
  config::RunConfig c;
  c.model.layers = 2;
  c.model.hidden = hidden;
  c.model.heads = 2;
  c.data.train = dir + "/train.bin";
  c.data.seq = 8;
  c.train.steps = 2;
  c.train.global_batch = 12;
  c.train.dtype = dtype;
  c.train.gradient_dtype = gradient;
  c.parallel.zero = zero;
  c.run.dir = dir + "/run";
  c.run.overwrite = true;
  return c;
}

constexpr int64_t kAlignment = 32;
int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Tensors of one flat buffer: each starts at a multiple of 32 elements, the buffer cuts into `ranks` such parts.
struct Group {
  std::vector<int64_t> numels;
  bool unit = false;  ///< gathered for use under zero = 3

  int64_t padded() const {
    int64_t sum = 0;
    for (const int64_t numel : numels) sum += round_up(numel, kAlignment);
    return sum;
  }
  int64_t length(int64_t ranks) const { return round_up(padded(), kAlignment * ranks); }
  /// Elements of tensors, without padding, in the shard of `rank`.
  int64_t owned(int64_t rank, int64_t ranks) const {
    const int64_t begin = rank * (length(ranks) / ranks), end = begin + length(ranks) / ranks;
    int64_t sum = 0, offset = 0;
    for (const int64_t numel : numels) {
      sum += std::max<int64_t>(0, std::min(offset + numel, end) - std::max(offset, begin));
      offset += round_up(numel, kAlignment);
    }
    return sum;
  }
};

/// What is reduced together: all (so small a model is one bucket); under zero = 3 each Unit (embedding, layers, head) and the rest.
std::vector<Group> groups_of(const config::RunConfig& c) {
  std::map<std::string, Group> groups;
  for (const auto& p : model::parameter_table(config::model_spec(c, c.model.vocab))) {
    int64_t numel = 1;
    for (const int64_t size : p.shape) numel *= size;
    const bool unit = c.parallel.zero == 3 && (p.name.rfind("layers.", 0) == 0 || p.name == "tok.weight" || p.name == "head.weight");
    Group& group = groups[unit ? p.name.substr(0, p.name.find('.', p.name.find('.') + 1)) : ""];
    group.unit = unit;
    group.numels.push_back(numel);
  }
  std::vector<Group> list;
  for (const auto& [name, group] : groups) list.push_back(group);
  return list;
}

std::string train(World& world, const std::string& argument) {
  const auto json = nlohmann::json::parse(argument);
  install_cpu_allocator();
  const auto c = configuration(json["dir"], json["dtype"], json["gradient"], json["hidden"], json["zero"]);
  // Asked after the first backward: from then on peaks are those of training, without the model's construction.
  const auto forget_construction = [first = true]() mutable {
    if (std::exchange(first, false)) memory::reset_peak();
    return false;
  };
  const train::RunResult result = train::run(c, world, {.on_job = {}, .stop_requested = forget_construction, .on_step = {}});
  nlohmann::json reply;
  for (const memory::Usage& usage : result.memory) {
    reply.push_back({{"live", usage.live_of}, {"peak", usage.peak_of}, {"at_peak", usage.at_peak}, {"total", usage.peak}});
  }
  return reply.dump();
}
const testing::RankBody kTrain("train_states", train);

struct Case {
  const char* dtype;
  int64_t weight, gradient, optimizer;  ///< bytes per parameter
};

/// Bytes that stay between two steps.
struct States {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  int64_t two_units = 0;  ///< of parameters, while two Units exist
};

/// One rank, or zero = 0: everything on every rank. One element more per tensor of a flat gradient buffer says whether any rank
/// used it, one per bucket whether all ranks finished.
States replicated(const Case& bytes, const Group& all, int64_t ranks) {
  const bool flat = ranks > 1 || bytes.weight != bytes.gradient;
  int64_t numel = 0;
  for (const int64_t n : all.numels) numel += n;
  const auto flags = static_cast<int64_t>(all.numels.size()) + 1;
  return {.parameters = bytes.weight * (flat ? all.padded() : numel),
          .gradients = bytes.gradient * (flat ? all.padded() + flags : numel),
          .optimizer = bytes.optimizer * numel};
}

/// zero = 1 to 3. Full gradients live in at most three buffers of the largest group's size (zero >= 2).
States sharded(const Case& bytes, const std::vector<Group>& groups, int64_t zero, int64_t rank, int64_t ranks) {
  constexpr size_t kGradientBuffers = 3;
  States s;
  int64_t longest = 0, longest_unit = 0;
  for (const Group& group : groups) {
    const int64_t length = group.length(ranks), shard = length / ranks;
    longest = std::max(longest, length);
    if (group.unit) longest_unit = std::max(longest_unit, length);
    s.parameters += bytes.weight * (group.unit ? shard : length);
    s.gradients += bytes.gradient * (zero == 1 ? length : shard);
    s.optimizer += bytes.optimizer * group.owned(rank, ranks);
  }
  if (zero >= 2) s.gradients += bytes.gradient * static_cast<int64_t>(std::min(kGradientBuffers, groups.size())) * longest;
  s.two_units = 2 * bytes.weight * longest_unit;
  return s;
}

int64_t of(const nlohmann::json& amounts, Category category) { return amounts[static_cast<size_t>(category)]; }

void expect_states(const nlohmann::json& usage, const States& want, bool gradients_stay) {
  EXPECT_EQ(of(usage["live"], Category::parameters), want.parameters);
  EXPECT_EQ(of(usage[gradients_stay ? "live" : "peak"], Category::gradients), want.gradients);
  EXPECT_EQ(of(usage["live"], Category::optimizer), want.optimizer);
  EXPECT_EQ(of(usage["peak"], Category::optimizer), want.optimizer) << "the update allocates nothing else";
  EXPECT_EQ(of(usage["live"], Category::activations), 0) << "freed with the step";
  EXPECT_GT(of(usage["peak"], Category::activations), 0);
  EXPECT_GT(usage["total"].get<int64_t>(), want.parameters);
}

void check(const Case& bytes, int ranks, int64_t hidden, int64_t zero = 0) {
  const testing::TempDir dir;
  const std::string folder = dir / ".";
  data::TokenWriter writer(folder + "/train.bin", 64, "bytes");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 2000; ++i) tokens.push_back((i * 5 + i / 11) % 64);
  writer.append(tokens);
  writer.finish();

  auto c = configuration(folder, bytes.dtype, "auto", hidden, zero);
  c.model.vocab = 64;
  const std::vector<Group> groups = groups_of(c);
  const nlohmann::json argument{
      {"dir", folder}, {"dtype", bytes.dtype}, {"gradient", bytes.gradient == 2 ? "bf16" : "fp32"}, {"hidden", hidden}, {"zero", zero}};
  const auto results = testing::on_processes(ranks, "train_states", argument.dump());
  for (const auto& rank : results) ASSERT_EQ(rank.exit_code, 0) << rank.result;
  const auto usages = nlohmann::json::parse(results[0].result);
  ASSERT_EQ(usages.size(), static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    SCOPED_TRACE("zero " + std::to_string(zero) + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    const nlohmann::json& usage = usages[static_cast<size_t>(rank)];
    const States want = zero == 0 ? replicated(bytes, groups.front(), ranks) : sharded(bytes, groups, zero, rank, ranks);
    const bool autograd_owns_gradients = zero == 0 && ranks == 1 && bytes.weight == bytes.gradient;
    expect_states(usage, want, !autograd_owns_gradients);
    if (zero == 3) {
      EXPECT_LE(of(usage["peak"], Category::parameters), want.parameters + want.two_units);
    }
  }
}

constexpr Case kFp32{"fp32", 4, 4, 8}, kBf16{"bf16", 2, 4, 12}, kFp16{"fp16", 2, 4, 12}, kLow{"bf16", 2, 2, 12};

TEST(ModelStates, SixteenBytesPerParameterInFp32) {
  check(kFp32, 1, 32);
  check(kFp32, 2, 32);
}
TEST(ModelStates, EighteenBytesPerParameterInBf16WithFp32Gradients) {
  check(kBf16, 1, 32);
  check(kBf16, 3, 32);
}
TEST(ModelStates, SixteenBytesPerParameterInBf16WithBf16Gradients) { check(kLow, 2, 32); }
TEST(ModelStates, EighteenBytesPerParameterInFp16WithFp32Gradients) { check(kFp16, 2, 32); }
TEST(ModelStates, PaddingIsAsStated) { check(kBf16, 2, 20); }

// What a rank keeps under ZeRO (bf16: 2 + 4 + 12/n, 2 + (4 + 12)/n, (2 + 4 + 12)/n and so on), to the byte.
TEST(ModelStates, ZeroOneSharesOutTheOptimizer) {
  check(kBf16, 3, 32, 1);
  check(kFp32, 2, 20, 1);
}
TEST(ModelStates, ZeroTwoSharesOutGradientsToo) {
  check(kBf16, 2, 32, 2);
  check(kLow, 3, 20, 2);
}
TEST(ModelStates, ZeroThreeSharesOutEverythingAndHoldsTwoUnitsMore) {
  check(kBf16, 4, 32, 3);
  check(kFp32, 3, 20, 3);
  check(kFp16, 2, 32, 3);
}

}  // namespace
}  // namespace weft
