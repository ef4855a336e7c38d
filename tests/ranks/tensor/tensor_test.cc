// Tensor and sequence parallelism on real ranks, against one rank.
#include <gmock/gmock.h>

#include <cmath>

#include "tests/ranks/tensor/verify_models.h"
#include "tests/support/ranks.h"
#include "weft/comm/mesh.h"
#include "weft/core/error.h"
#include "weft/model/presets.h"
#include "weft/models/transformer.h"
#include "weft/nn/placement.h"
#include "weft/nn/vocab_parallel.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/whole.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::on_threads;

at::TensorOptions fp64() { return at::TensorOptions(at::kDouble); }

at::Tensor random_of(uint64_t seed, std::vector<int64_t> sizes) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), fp64());
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  const double worst = (a - b).abs().max().item<double>() / b.abs().max().item<double>();
  return std::isfinite(worst) ? worst : 1e300;
}

/// Models x layouts such that each layout and each kind of cut is seen; all of them run under the label full.
TEST(TensorParity, ModelsUnderLayoutsEqualOneRank) {
  const auto layouts = [](const char* text) { return train::split_layouts(text); };
  testing::expect_verified(testing::kVerifyModels[0], layouts("tp=3,sequence_parallel=true; dp=2,tp=2,micro_batch=2,train.recompute=full; dp_shard=2,zero=3,tp=2,sequence_parallel=true; "
                                                              "dp_shard=2,zero=3,tp=2,sequence_parallel=true,tp_overlap=4,train.recompute=full"));
  testing::expect_verified(testing::kVerifyModels[1], layouts("tp=4,sequence_parallel=true; dp_shard=2,zero=3,tp=2,train.recompute=full"));
  testing::expect_verified(testing::kVerifyModels[3], layouts("tp=2; tp=3,tp_overlap=2; dp=2,zero=2,tp=2,micro_batch=2"));
  testing::expect_verified(testing::kVerifyModels[4], layouts("tp=4; tp=4,sequence_parallel=true,tp_overlap=3,train.recompute=keep_attention; dp=4,dp_shard=2,zero=3,tp=2"));
  testing::expect_verified(testing::kVerifyModels[5], layouts("tp=2,sequence_parallel=true; dp=2,zero=1,tp=2"));
}

TEST(TensorParity, LossesInFp32AreOneRanks) {
  testing::expect_verified(testing::kVerifyModels[1], train::split_layouts("tp=2,sequence_parallel=true; dp=2,tp=2"), "fp32");
}

TEST(TensorParity, OnGlooAsWell) {
  testing::expect_verified(testing::kVerifyModels[0], train::split_layouts("tp=3; tp=2,sequence_parallel=true; dp_shard=2,zero=3,tp=2"), "fp64", "gloo");
}

/// Known faults, each in one rank.
TEST(Verify, FindsAndNamesWhatIsBroken) {
  testing::TempDir dir;
  testing::write_verify_tokens(dir / "tokens.bin");
  const auto config = testing::verify_config(testing::kVerifyModels[4], dir / "tokens.bin");
  const auto first_of = [&](const std::string& layout, std::function<void(at::Tensor&)> fault, const std::string& name) {
    train::VerifyOptions options{.steps = 2};
    options.on_built = [&](train::Learner& learner, const World& world) {
      at::Tensor parameter = learner.model()->named_parameters()[name];
      if (world.rank() == world.size() - 1) fault(parameter);
    };
    const VerifyReport report = train::verify(config, {layout}, options);
    EXPECT_FALSE(report.ok());
    EXPECT_THAT(to_text(report), HasSubstr("OUT: "));
    return report.rows.front().first;
  };
  const auto scale_gradient = [](at::Tensor& p) { p.register_hook([](const at::Tensor& g) { return g * 1.001; }); };
  const auto nudge = [](at::Tensor& p) {
    const at::NoGradGuard no_grad;
    p.flatten()[3].add_(1e-3);
  };
  EXPECT_THAT(first_of("tp=2", scale_gradient, "layers.1.attn.wo.weight"), StartsWith("gradient of layers.1.attn.wo.weight"));
  // The last of four ranks holds a copy: the first two steps' numbers are right, and then the copies part.
  EXPECT_THAT(first_of("tp=4", scale_gradient, "layers.0.attn.wk.weight"), StartsWith("copies of layers.0.attn.wk.weight"));
  EXPECT_THAT(first_of("tp=2,sequence_parallel=true", scale_gradient, "layers.1.norm2.weight"), StartsWith("copies of layers.1.norm2.weight"));
  EXPECT_THAT(first_of("tp=2", nudge, "layers.0.ffn.w2.weight"), StartsWith("start values of layers.0.ffn.w2.weight"));
  // Ranks that rank 0 shares no group with: it computes what one rank does.
  const auto drifting = [&](const std::string& layout, int64_t rank) {
    train::VerifyOptions options{.steps = 1};
    options.on_step = [rank](train::Learner& learner, const World& world) {
      const at::NoGradGuard no_grad;
      if (world.rank() == rank) learner.model()->named_parameters()["norm.weight"].mul_(1 + 1e-7);
    };
    return train::verify(config, {layout}, options).rows.front().first;
  };
  EXPECT_THAT(drifting("dp=2,tp=2", 3), StartsWith("copies of norm.weight on tensor-parallel ranks"));
  EXPECT_THAT(drifting("dp=2", 1), StartsWith("copies of norm.weight on data-parallel ranks"));
  EXPECT_THAT(first_of("tp=5", nudge, "tok.weight"), AllOf(HasSubstr("5 ranks"), HasSubstr("legal")));
}

/// Shoeybi et al. 2019, section 3; known cases 18 and 19.
TEST(VocabParallel, LossOfOneRowHasItsTextbookValueAndGradient) {
  const auto run = [](World& world, const at::Tensor& logits, int64_t label, nn::Kernels kernels) {
    const int64_t vocab = logits.numel();
    const nn::VocabPart part(nn::TensorAxis(world.comm()), vocab);
    // hidden [1, V] of one-hot rows makes weight's diagonal the logits: d loss / d weight[i][i] is that of logit i.
    const at::Tensor hidden = at::ones({1, 1}, fp64()).requires_grad_();
    at::Tensor weight = logits.narrow(0, part.rows.begin, part.rows.size).reshape({-1, 1}).clone().requires_grad_();
    const auto [sum, valid] = nn::vocab_parallel_cross_entropy(hidden, weight, at::full({1}, label, at::kLong), -100, 0, kernels, part);
    sum.backward();
    EXPECT_EQ(valid, 1);
    const at::Tensor whole = nn::whole_tensor(weight.grad(), std::make_shared<nn::TensorPlacement>(
        nn::TensorPlacement{.comm = world.comm(), .shape = {vocab, 1}, .dim = 0, .begin = part.rows.begin}));
    return std::pair(sum.item<double>(), whole.flatten());
  };
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](World& world) {
      for (const auto kernels : {nn::Kernels::fused, nn::Kernels::torch}) {
        const auto [loss, gradient] = run(world, at::arange(4, fp64()), 3, kernels);
        EXPECT_NEAR(loss, 0.4402, 5e-5);
        EXPECT_LT((gradient - at::tensor({0.0321, 0.0871, 0.2369, -0.3561}, at::kDouble)).abs().max().item<double>(), 5e-5);
        EXPECT_NEAR(run(world, at::arange(5, fp64()), 4, kernels).first, 0.4519, 5e-5) << "no padding row takes part";
      }
      if (world.size() == 1) return;
      const nn::VocabPart part(nn::TensorAxis(world.comm()), 4);
      const at::Tensor all_rows = at::ones({4, 1}, fp64());
      EXPECT_THROW(nn::vocab_parallel_cross_entropy(at::ones({1, 1}, fp64()), all_rows, at::zeros({1}, at::kLong), -100, 0, nn::Kernels::fused, part),
                   ConfigError);
    });
  }
}

/// GPT-2's vocabulary divides by nothing; rows of ignored targets; ids that do not exist.
TEST(VocabParallel, TheVocabularyOf50257OnTwoAndThreeRanks) {
  constexpr int64_t kVocab = 50257, kRows = 7, kWidth = 4;
  const at::Tensor table = random_of(1, {kVocab, kWidth}), hidden = random_of(2, {kRows, kWidth});
  at::Tensor targets = at::tensor({0, 50256, 25128, -100, 16752, 33505, 7}, at::kLong);
  const at::Tensor h1 = hidden.clone().requires_grad_(), w1 = table.clone().requires_grad_();
  const at::Tensor expected = at::cross_entropy_loss(at::linear(h1, w1), targets, {}, at::Reduction::Sum, -100);
  expected.backward();
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](World& world) {
      const nn::TensorAxis tp(world.comm());
      const nn::VocabPart part(tp, kVocab);
      EXPECT_LE(std::abs(part.rows.size - kVocab / ranks), 1);
      const at::Tensor h = hidden.clone().requires_grad_();
      const at::Tensor w = table.narrow(0, part.rows.begin, part.rows.size).clone().requires_grad_();
      const auto [sum, valid] = nn::vocab_parallel_cross_entropy(tp.enter(h), w, targets, -100, 0, nn::Kernels::fused, part);
      sum.backward();
      EXPECT_EQ(valid, kRows - 1);
      EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-10 * expected.item<double>());
      EXPECT_LT(relative(h.grad(), h1.grad()), 1e-10);
      EXPECT_LT(relative(w.grad(), w1.grad().narrow(0, part.rows.begin, part.rows.size)), 1e-10);
      nn::VocabEmbedding embedding(part, kWidth, fp64());
      {
        const at::NoGradGuard no_grad;
        embedding->weight.copy_(w);
      }
      const at::Tensor ids = at::tensor({50256, 0, 25128, 16752}, at::kLong).view({2, 2});
      EXPECT_TRUE(at::equal(embedding(ids), at::embedding(table, ids)));
      EXPECT_THROW(embedding(at::full({1, 1}, kVocab, at::kLong)), ConfigError);
    });
  }
}

/// Known case 25.
TEST(RowParallel, TheBiasIsAddedOnce) {
  on_threads(2, [](World& world) {
    for (const bool sequence : {false, true}) {
      const nn::TensorAxis tp(world.comm(), sequence);
      nn::RowLinear row(1, 3, true, fp64(), tp);
      const at::Tensor parts[] = {at::tensor({10.0, 20.0, 30.0}, at::kDouble), at::tensor({20.0, 50.0, 80.0}, at::kDouble)};
      {
        const at::NoGradGuard no_grad;
        row->weight.copy_(parts[world.rank()].view({3, 1}));
        row->bias.copy_(at::tensor({100.0, 200.0, 300.0}, at::kDouble));
      }
      const at::Tensor x = at::tensor({1.0, 2.0}, at::kDouble).view({1, 2, 1});  // two tokens
      const at::Tensor y = row(x), expected = at::tensor({130.0, 270.0, 410.0, 160.0, 340.0, 520.0}, at::kDouble).view({1, 2, 3});
      EXPECT_TRUE(at::equal(y, sequence ? expected.narrow(1, world.rank(), 1) : expected));
      y.sum().backward();
      EXPECT_TRUE(at::equal(row->bias.grad(), at::full({3}, 2.0, fp64()))) << "two tokens, whoever has them";
    }
  });
}

/// Known case 26.
TEST(SequenceParallel, GradientsOfNormWeightsAreSummed) {
  on_threads(2, [](World& world) {
    const nn::TensorAxis tp(world.comm(), true);
    nn::Norm norm(2, model::NormKind::rms, false, 0.0, nn::Kernels::torch, fp64(), tp.sequence_comm());
    {
      const at::NoGradGuard no_grad;
      norm->weight.fill_(1);
    }
    const at::Tensor x = at::ones({1, 1, 2}, fp64());  // its norm is 1
    (norm(x) * at::tensor({1.0 + 2 * world.rank(), 2.0 + 2 * world.rank()}, at::kDouble)).sum().backward();
    EXPECT_TRUE(at::allclose(norm->weight.grad(), at::tensor({4.0, 6.0}, at::kDouble)));
  });
}

/// Known case 9: sharded gradients 3 and 4, a replicated one of 12.
TEST(TensorNorm, CountsWhatRanksShareOnce) {
  on_threads(4, [](World& world) {
    const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const Comm tp = mesh["tp"];
    for (const Sharding sharding : {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
      at::Tensor cut = at::ones({1}, fp64()).requires_grad_(), same = at::ones({1}, fp64()).requires_grad_();
      nn::set_placement(cut, {.comm = tp, .shape = {2}, .dim = 0, .begin = tp.rank()});
      nn::set_placement(same, {.comm = tp, .shape = {1}, .dim = -1, .copies = 2});
      DataParallel dp({{"cut", cut}, {"same", same}}, {}, mesh["dp"], {.sharding = sharding});
      (cut * (3.0 + tp.rank()) + same * 12.0).sum().backward();
      EXPECT_NEAR(dp.grad_norm(), 13, 1e-12);
      EXPECT_NEAR(dp.grad_norm(std::numeric_limits<double>::infinity()), 12, 1e-12);
      EXPECT_NEAR(dp.grad_norm(1), 19, 1e-12);
      const auto whole = parallel::whole_gradients(dp);
      EXPECT_TRUE(at::equal(whole[0].tensor, at::tensor({3.0, 4.0}, at::kDouble))) << whole[0].tensor;
      EXPECT_TRUE(at::equal(whole[1].tensor, at::tensor({12.0}, at::kDouble)));
    }
  });
  on_threads(2, [](World& world) {
    at::Tensor a = at::ones({1}, fp64()).requires_grad_(), b = at::ones({1}, fp64()).requires_grad_();
    nn::set_placement(a, {.comm = world.comm(), .shape = {2}, .dim = 0, .begin = world.rank()});
    nn::set_placement(b, {.comm = world.comm().split([](int rank) { return SplitPlace{0, rank}; }, "other"), .shape = {2}, .dim = 0, .begin = world.rank()});
    try {
      const DataParallel dp({{"a", a}, {"b", b}}, {}, Comm(), {});
      ADD_FAILURE() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'a'"), HasSubstr("'b'"), HasSubstr("'other'")));
    }
  });
}

/// However many pieces travel beside the products, and however they fall.
TEST(TensorOverlap, PiecesChangeNothing) {
  constexpr int64_t kIn = 5, kInner = 6, kPerRank = 3;
  const at::Tensor w1 = random_of(1, {kInner, kIn}), w3 = random_of(2, {2, kIn}), b1 = random_of(3, {kInner}), w2 = random_of(4, {4, kInner});
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](World& world) {
      const int64_t me = world.rank();
      // y, and the gradients of x, both weights behind the entry, a bias, and the weight before the exit.
      const auto run = [&](const std::vector<int64_t>& sizes, bool sequence, int64_t overlap) {
        const nn::TensorAxis tp(world.comm(), sequence, overlap);
        std::vector<at::Tensor> leaves{random_of(7 + (sequence ? me : 0), sizes), w1 + me, w3 * (me + 1), b1 - me, w2 * (me + 2)};
        for (at::Tensor& t : leaves) t.requires_grad_();
        const auto h = tp.enter_products(leaves[0], {leaves[1], leaves[2]}, {leaves[3], at::Tensor()});
        const at::Tensor y = tp.product_leave(at::tanh(h[0]) * h[1].sum(-1, true), leaves[4]);
        (y * at::arange(y.numel(), fp64()).sin().view(y.sizes())).sum().backward();
        std::vector<at::Tensor> result{y.detach()};
        for (const at::Tensor& t : leaves) result.push_back(t.grad());
        return result;
      };
      for (const bool sequence : {false, true}) {
        for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, kPerRank, kIn}, {1, kPerRank, kIn}, {2, kPerRank, 2, kIn}, {7, kIn}}) {
          if (sequence && sizes.size() == 2) continue;  // no dim of positions
          const auto expected = run(sizes, sequence, 1);
          for (const int64_t overlap : {2, 3, 50}) {
            const auto found = run(sizes, sequence, overlap);
            for (size_t i = 0; i < expected.size(); ++i) {
              ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << i;
              EXPECT_LT(relative(found[i], expected[i]), 1e-13) << "tensor " << i << ", " << overlap << " pieces" << (sequence ? ", sequence" : "");
            }
          }
        }
      }
      const nn::TensorAxis tp(world.comm(), false, 2);
      const at::Tensor x = random_of(1, {2, 2, kIn}).requires_grad_();
      const at::Tensor y = tp.enter_products(x, {w1}, {at::Tensor()})[0].square().sum();
      EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true), ConfigError);
      EXPECT_THROW(nn::TensorAxis(world.comm(), false, 0), ConfigError);
    });
  }
}

/// Bytes of activations per block, fp64: two all-reduces of [B, T, D] forward and two backward, or with sequence parallelism as
/// many gathers and reduce-scatters, which send the same bytes. Around the blocks: the embedding, the head's entry, and the loss's
/// three numbers per row.
TEST(TensorTraffic, OfABlockEqualsTheFormula) {
  constexpr int64_t kBatch = 2, kTokens = 8;
  model::ModelSpec spec = model::preset("llama-tiny");
  for (const auto& [sequence, overlap] : {std::pair(false, 1), {true, 1}, {false, 2}, {true, 2}}) {
    std::vector<std::map<std::string, TrafficCount>> of(2);
    for (const int64_t layers : {1, 2}) {
      spec.blocks.resize(static_cast<size_t>(layers), spec.blocks.front());
      on_threads(2, [&, sequence = sequence, overlap = overlap](World& world) {
        const nn::TensorAxis tp(world.comm(), sequence, overlap);
        models::Transformer model(spec, models::TransformerOptions{.dtype = at::kDouble, .seed = 1, .tp = tp});
        const auto before = world.comm().traffic();
        const at::Tensor tokens = at::arange(kBatch * kTokens).view({kBatch, kTokens});
        model->loss_sum(tokens, tokens).sum.backward();
        if (world.rank() != 0) return;
        auto counts = world.comm().traffic();
        for (const auto& [op, count] : before) {
          counts[op] = {counts[op].calls - count.calls, counts[op].bytes - count.bytes, counts[op].sent - count.sent};
        }
        of[static_cast<size_t>(layers - 1)] = counts;
      });
    }
    const auto per_block = [&](const std::string& op) {
      return TrafficCount{of[1][op].calls - of[0][op].calls, of[1][op].bytes - of[0][op].bytes, of[1][op].sent - of[0][op].sent};
    };
    const int64_t activation = kBatch * kTokens * spec.hidden * 8;
    int64_t sent = 0;
    if (sequence) {
      EXPECT_EQ(per_block("all_gather").calls, 4 * overlap);
      EXPECT_EQ(per_block("reduce_scatter").calls, 4 * overlap);
      EXPECT_EQ(per_block("all_reduce").calls, 2) << "of the two norms' weights";
      EXPECT_EQ(per_block("all_reduce").bytes, 2 * spec.hidden * 8);
      sent = per_block("all_gather").sent + per_block("reduce_scatter").sent;
    } else {
      EXPECT_EQ(per_block("all_reduce").calls, 4 * overlap);
      EXPECT_EQ(per_block("all_gather").calls, 0);
      sent = per_block("all_reduce").sent;
    }
    EXPECT_EQ(sent, 4 * activation) << "4 all-reduces of 2 (n - 1) / n of the activations";
    EXPECT_EQ(of[0]["all_gather"].bytes - (sequence ? 6 * activation : 0), 2 * kBatch * kTokens * 3 * 8) << "no logits travel";
  }
}

TEST(TensorLayout, IllegalSizesAreRefusedWithTheLegalOnes) {
  on_threads(4, [](World& world) {
    const auto text_of = [&](const model::ModelSpec& spec, bool sequence, int64_t tokens) -> std::string {
      try {
        models::Transformer model(spec, models::TransformerOptions{.tp = nn::TensorAxis(world.comm(), sequence)});
        model->forward(at::zeros({1, tokens}, at::kLong));
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    model::ModelSpec spec = model::preset("llama-tiny");
    EXPECT_THAT(text_of(spec, true, 10), AllOf(HasSubstr("10 tokens over 4 ranks"), HasSubstr("8 and 12")));
    for (auto& block : spec.blocks) block.attention.kv_heads = 1, block.attention.heads = 3;
    EXPECT_THAT(text_of(spec, false, 8), AllOf(HasSubstr("4 ranks cannot share out 3 query heads over 1 key heads"), HasSubstr("1, 2, 3")));
    models::Transformer model(model::preset("llama-tiny"), models::TransformerOptions{.tp = nn::TensorAxis(world.comm())});
    EXPECT_THROW(model->logits(at::zeros({1, 4}, at::kLong)), ConfigError);
  });
}

}  // namespace
}  // namespace weft
