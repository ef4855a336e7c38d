// Bytes of model states of the trainer, by category, against the table in docs/memory.md: 16 bytes per parameter in fp32,
// 18 in bf16 with fp32 gradients and master weights (ZeRO: Memory Optimizations, Rajbhandari et al. 2020, section 3.1; Megatron-LM's
// distributed optimizer documentation for 18). Ranks are processes, as accounts are.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

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

struct Sizes {
  int64_t parameters = 0, padded = 0, tensors = 0;
};

config::RunConfig configuration(const std::string& dir, const std::string& dtype, const std::string& gradient,
                                int64_t hidden) {
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
  c.run.dir = dir + "/run";
  c.run.overwrite = true;
  return c;
}

/// Every parameter starts at a multiple of 32 elements of the flat buffers.
Sizes sizes_of(const config::RunConfig& c) {
  constexpr int64_t kAlignment = 32;
  Sizes sizes;
  for (const auto& p : model::parameter_table(config::model_spec(c, c.model.vocab))) {
    int64_t numel = 1;
    for (const int64_t size : p.shape) numel *= size;
    sizes.parameters += numel;
    sizes.padded += (numel + kAlignment - 1) / kAlignment * kAlignment;
    ++sizes.tensors;
  }
  return sizes;
}

std::string train(World& world, const std::string& argument) {
  const auto json = nlohmann::json::parse(argument);
  install_cpu_allocator();
  const auto c = configuration(json["dir"], json["dtype"], json["gradient"], json["hidden"]);
  const train::RunResult result = train::run(c, world);
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

void check(const Case& bytes, int ranks, int64_t hidden) {
  const testing::TempDir dir;
  const std::string folder = dir / ".";
  data::TokenWriter writer(folder + "/train.bin", 64, "bytes");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 2000; ++i) tokens.push_back((i * 5 + i / 11) % 64);
  writer.append(tokens);
  writer.finish();

  auto c = configuration(folder, bytes.dtype, "auto", hidden);
  c.model.vocab = 64;
  const Sizes n = sizes_of(c);
  const nlohmann::json argument{{"dir", folder}, {"dtype", bytes.dtype}, {"gradient", bytes.gradient == 2 ? "bf16" : "fp32"}, {"hidden", hidden}};
  const auto results = testing::on_processes(ranks, "train_states", argument.dump());
  for (const auto& rank : results) ASSERT_EQ(rank.exit_code, 0) << rank.result;
  const bool flat = ranks > 1 || bytes.weight != bytes.gradient;
  const auto usages = nlohmann::json::parse(results[0].result);
  ASSERT_EQ(usages.size(), static_cast<size_t>(ranks));
  for (const auto& usage : usages) {
    const auto live = usage["live"].get<memory::Amounts>(), peak = usage["peak"].get<memory::Amounts>();
    const auto of = [](const memory::Amounts& a, Category category) { return a[static_cast<size_t>(category)]; };
    EXPECT_EQ(of(live, Category::parameters), bytes.weight * (flat ? n.padded : n.parameters));
    // Flat buffers live on. One element more per tensor says whether any rank used it, one per bucket whether all ranks
    // finished; so small a model is one bucket.
    EXPECT_EQ(of(flat ? live : peak, Category::gradients), bytes.gradient * (flat ? n.padded + n.tensors + 1 : n.parameters));
    EXPECT_EQ(of(live, Category::optimizer), bytes.optimizer * n.parameters);
    EXPECT_EQ(of(peak, Category::optimizer), of(live, Category::optimizer)) << "the update allocates nothing else";
    EXPECT_EQ(of(live, Category::activations), 0) << "freed with the step";
    EXPECT_GT(of(peak, Category::activations), 0);
    EXPECT_GT(usage["total"].get<int64_t>(), of(live, Category::parameters));
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

}  // namespace
}  // namespace weft
