// Each optimizer on one rank against the formulas of its paper (tests/reference/optimizers.h), and what all of them share.
#include <set>
#include <sstream>
#include <torch/serialize.h>

#include "tests/reference/optimizers.h"
#include "tests/support/test_pch.h"
#include "weft/core/error.h"
#include "weft/optim/adafactor.h"
#include "weft/optim/adam8bit.h"
#include "weft/optim/lion.h"
#include "weft/optim/muon.h"
#include "weft/optim/optim.h"

namespace weft::optim {
namespace {

using Groups = std::vector<OptimizerParamGroup>;

/// Shapes with vector tails, blocks of 256 that are not full, matrices wide and tall, and nothing at all.
const std::vector<std::vector<int64_t>> kShapes{{67, 65}, {24, 40}, {5000}, {40, 8}, {7}, {1}, {0}};

/// Trains `rounds` steps with Weft's optimizer and, tensor by tensor, with the reference; fp64.
template <class Reference, class Make>
double difference_after(int rounds, const std::vector<std::vector<int64_t>>& shapes, const Reference& reference, const Make& make) {
  at::set_num_threads(1);  // small tensors: waking threads would take most of the time
  torch::manual_seed(5);
  std::vector<at::Tensor> ours, theirs;
  for (const auto& shape : shapes) {
    theirs.push_back(torch::randn(shape, torch::kDouble));
    ours.push_back(theirs.back().clone().requires_grad_());
  }
  std::vector<Reference> rules(shapes.size(), reference);
  const std::unique_ptr<torch::optim::Optimizer> optimizer = make(ours);
  for (int step = 0; step < rounds; ++step) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const at::Tensor grad = torch::randn(shapes[i], torch::kDouble) * (step % 3 == 2 ? 1e-4 : 1.0);
      ours[i].mutable_grad() = grad;
      if (theirs[i].numel() > 0) rules[i].update(theirs[i], grad);
    }
    optimizer->step();
  }
  double worst = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (theirs[i].numel() == 0) continue;
    worst = std::max(worst, ((ours[i] - theirs[i]).abs().max() / theirs[i].abs().max()).template item<double>());
  }
  return worst;
}

constexpr double kFp64 = 1e-13;
const AdamWOptions kAdamW = AdamWOptions(1e-2).betas({0.9, 0.95}).weight_decay(0.1);
const LionOptions kLion = LionOptions(1e-2).betas({0.9, 0.99}).weight_decay(0.1);

TEST(Rules, AreThoseOfThePapers) {
  EXPECT_LE(difference_after(10, kShapes, reference::AdamW(), [](auto p) { return std::make_unique<AdamW>(Groups{{p}}, kAdamW); }), kFp64);
  EXPECT_LE(difference_after(10, kShapes, reference::AdamWBf16Moments(), [](auto p) {
    auto optimizer = std::make_unique<AdamW>(Groups{{p}}, kAdamW);
    optimizer->keep_moments_in_bf16();
    return optimizer;
  }), kFp64);
  EXPECT_LE(difference_after(10, kShapes, reference::Lion(), [](auto p) { return std::make_unique<Lion>(Groups{{p}}, kLion); }), kFp64);
  EXPECT_LE(difference_after(10, kShapes, reference::Adam8bit(), [](auto p) { return std::make_unique<Adam8bit>(Groups{{p}}, kAdamW); }), kFp64);
}

TEST(Rules, AdafactorIsThatOfThePaper) {
  for (const bool relative : {true, false}) {
    for (const double beta1 : {0.0, 0.9}) {
      reference::Adafactor reference;
      reference.relative = relative;
      reference.beta1 = beta1;
      EXPECT_LE(difference_after(10, kShapes, reference, [&](auto p) {
        return std::make_unique<Adafactor>(Groups{{p}}, AdafactorOptions(1e-2).scale_parameter(relative).beta1(beta1).weight_decay(0.1));
      }), kFp64) << relative << ' ' << beta1;
    }
  }
}

TEST(Rules, MuonIsThatOfThePaper) {
  for (const bool nesterov : {true, false}) {
    reference::Muon reference;
    reference.nesterov = reference.match_adamw = nesterov;
    const auto options = MuonOptions(1e-2).nesterov(nesterov).match_adamw(nesterov);
    EXPECT_LE(difference_after(10, {{67, 65}, {24, 40}, {40, 8}, {3, 3}}, reference,
                               [&](auto p) { return std::make_unique<Muon>(Groups{{p}}, options); }), kFp64);
  }
  const auto rest = MuonOptions(1e-2).orthogonalise(false).betas({0.9, 0.95});
  EXPECT_LE(difference_after(10, kShapes, reference::AdamW(), [&](auto p) { return std::make_unique<Muon>(Groups{{p}}, rest); }), kFp64);
  // Singular values come near 1, whatever they were.
  torch::manual_seed(1);
  const at::Tensor values = std::get<1>(torch::svd(orthogonalise(torch::randn({30, 50}, torch::kDouble), 5)));
  EXPECT_GT(values.min().item<double>(), 0.5);
  EXPECT_LT(values.max().item<double>(), 1.3);
}

/// Makes an elementwise optimizer of each kind.
struct Kind {
  const char* name;
  std::function<std::unique_ptr<ElementwiseOptimizer>(const Groups&)> make;
};
std::vector<Kind> kinds() {
  return {{"adamw", [](const Groups& g) { return std::make_unique<AdamW>(g, kAdamW); }},
          {"sgd", [](const Groups& g) { return std::make_unique<SGD>(g, SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1)); }},
          {"lion", [](const Groups& g) { return std::make_unique<Lion>(g, kLion); }},
          {"adam8bit", [](const Groups& g) { return std::make_unique<Adam8bit>(g, kAdamW); }}};
}

// What offload relies on: an update of stretches, each with its own state, has the bits of the whole.
TEST(Rules, StretchesHaveTheBitsOfTheWhole) {
  constexpr int64_t kNumel = 9000;
  for (const Kind& kind : kinds()) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      torch::manual_seed(2);
      const at::Tensor start = torch::randn({kNumel}, dtype);
      at::Tensor whole = start.clone().requires_grad_(), parts = start.clone().requires_grad_();
      const auto of_whole = kind.make({OptimizerParamGroup({whole})}), of_parts = kind.make({OptimizerParamGroup({parts})});
      const OptimizerOptions& options = of_parts->param_groups()[0].options();
      const std::vector<StateSpec> specs = of_parts->own_states(parts, options);
      std::vector<at::Tensor> states;
      for (const StateSpec& spec : specs) states.push_back(at::zeros({spec.numel(kNumel)}, spec.dtype));
      const std::vector<int64_t> cuts{0, 256, 768, 4096, 8960, kNumel};
      for (int64_t step = 1; step <= 3; ++step) {
        whole.mutable_grad() = torch::randn({kNumel}, dtype);
        const at::Tensor grad = whole.grad().clone();
        of_whole->step();
        const at::NoGradGuard no_grad;
        for (size_t k = 0; k + 1 < cuts.size(); ++k) {
          const int64_t begin = cuts[k], n = cuts[k + 1] - begin;
          ASSERT_EQ(begin % of_parts->granule(parts), 0);
          Stretch stretch{.weight = parts.detach().narrow(0, begin, n), .grad = grad.narrow(0, begin, n), .copy = {}, .states = {}, .step = step, .begin = begin};
          for (size_t s = 0; s < specs.size(); ++s) stretch.states.push_back(states[s].narrow(0, begin / specs[s].per, specs[s].numel(n)));
          of_parts->update(stretch, options);
        }
      }
      EXPECT_TRUE(at::equal(whole, parts)) << kind.name << ' ' << dtype;
      EXPECT_FALSE(at::equal(whole, start));
    }
  }
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;

/// All of them.
std::vector<std::pair<std::string, Make>> makers() {
  std::vector<std::pair<std::string, Make>> list;
  for (const Kind& kind : kinds()) list.emplace_back(kind.name, kind.make);
  list.emplace_back("adafactor", [](const Groups& g) { return std::make_unique<Adafactor>(g, AdafactorOptions(1e-1).beta1(0.9)); });
  list.emplace_back("muon", [](const Groups& g) { return std::make_unique<Muon>(g, MuonOptions(1e-2)); });
  return list;
}

// bf16 weights are the rounding of a run in fp32, whatever the type of the gradient; fault class "optimizer moments dropped".
TEST(Rules, MastersAndSavedStatesContinueBitEqual) {
  for (const auto& [name, make] : makers()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      torch::manual_seed(3);
      const at::Tensor start = torch::randn({90, 50}).to(dtype);
      at::Tensor low = start.clone().requires_grad_(), high = start.to(at::kFloat, false, /*copy=*/true).requires_grad_(), again;
      const auto a = make({OptimizerParamGroup({low})}), b = make({OptimizerParamGroup({high})});
      std::unique_ptr<torch::optim::Optimizer> resumed;
      std::stringstream file;
      for (int step = 0; step < 8; ++step) {
        if (step == 4) {
          torch::save(*a, file);
          again = low.detach().clone().requires_grad_();
          resumed = make({OptimizerParamGroup({again})});
          torch::load(*resumed, file);
        }
        const at::Tensor grad = torch::randn({90, 50}).to(dtype);
        low.mutable_grad() = grad;
        high.mutable_grad() = grad.to(at::kFloat);
        a->step();
        b->step();
        if (resumed) {
          again.mutable_grad() = grad;
          resumed->step();
        }
      }
      EXPECT_TRUE(at::equal(low.detach(), high.detach().to(dtype))) << name << ' ' << dtype;
      EXPECT_TRUE(at::equal(low.detach(), again.detach())) << name << ' ' << dtype;
      EXPECT_FALSE(at::equal(low.detach(), start)) << name;
    }
  }
}

TEST(Rules, StatesAreWhatIsPromised) {
  const auto bytes = [](const ElementwiseOptimizer& optimizer, const at::Tensor& p) {
    int64_t sum = 0;
    for (const StateSpec& spec : optimizer.state_specs(p, optimizer.param_groups()[0].options())) {
      sum += spec.numel(p.numel()) * static_cast<int64_t>(c10::elementSize(spec.dtype));
    }
    return static_cast<double>(sum) / static_cast<double>(p.numel());
  };
  const std::vector<double> fp32{8, 4, 4, 2 + 8.0 / 256}, bf16{12, 8, 8, 6 + 8.0 / 256};
  for (size_t i = 0; i < kinds().size(); ++i) {
    const at::Tensor wide = torch::ones({8192}).requires_grad_(), low = torch::ones({8192}, at::kBFloat16).requires_grad_();
    EXPECT_EQ(bytes(*kinds()[i].make({OptimizerParamGroup({wide})}), wide), fp32[i]) << kinds()[i].name;
    EXPECT_EQ(bytes(*kinds()[i].make({OptimizerParamGroup({low})}), low), bf16[i]) << kinds()[i].name;
  }
  at::Tensor small = torch::ones({4095}).requires_grad_();
  EXPECT_EQ(bytes(*kinds()[3].make({OptimizerParamGroup({small})}), small), 8.0) << "small parameters keep fp32 moments";
  AdamW low_moments({OptimizerParamGroup({small})}, kAdamW);
  low_moments.keep_moments_in_bf16();
  EXPECT_EQ(bytes(low_moments, small), 4.0);
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Rules, WhatTheyCannotDoIsRefused) {
  using ::testing::HasSubstr;
  at::Tensor p = torch::ones({4}).requires_grad_();
  const Groups groups{OptimizerParamGroup({p})};
  EXPECT_THAT(error_of([&] { AdamW(groups, AdamWOptions(1e-3)).keep_moments_in_bf16(); }), HasSubstr("0.999"));
  EXPECT_THAT(error_of([&] { Adam8bit(groups, AdamWOptions(1e-3).amsgrad(true)); }), HasSubstr("amsgrad"));
  EXPECT_THAT(error_of([&] { Lion(groups, LionOptions(-1)); }), HasSubstr("lr is -1"));
  EXPECT_THAT(error_of([&] { Lion(groups, LionOptions(1).betas({0.9, 1})); }), HasSubstr("beta2 is 1"));
  EXPECT_THAT(error_of([&] { Muon(groups, MuonOptions(1)); }), HasSubstr("[4] is no matrix"));
  EXPECT_THAT(error_of([&] { Muon(groups, MuonOptions(1).orthogonalise(false).steps(0)); }), HasSubstr("steps is 0"));
  EXPECT_THAT(error_of([&] { Adafactor(groups, AdafactorOptions(1).clip_threshold(0)); }), HasSubstr("clip_threshold"));
  at::Tensor apart = torch::ones({4, 4}).t().narrow(0, 0, 2).detach().requires_grad_();
  apart.mutable_grad() = torch::ones({2, 4});
  Lion lion({OptimizerParamGroup({apart})});
  EXPECT_THAT(error_of([&] { lion.step(); }), HasSubstr("not contiguous"));
  // A state of another kind.
  AdamW adamw(groups, kAdamW);
  p.mutable_grad() = torch::ones({4});
  adamw.step();
  std::stringstream file;
  torch::save(adamw, file);
  AdamW low(groups, kAdamW);
  low.keep_moments_in_bf16();
  torch::load(low, file);
  EXPECT_THAT(error_of([&] { low.step(); }), HasSubstr("exp_avg"));
}

TEST(Rules, GroupsKeepTheirOptions) {
  at::Tensor a = torch::ones({4}).requires_grad_(), b = torch::ones({4}).requires_grad_();
  Groups groups;
  groups.emplace_back(std::vector<at::Tensor>{a}, std::make_unique<LionOptions>(LionOptions(1e-4)));
  groups.emplace_back(std::vector<at::Tensor>{b}, std::make_unique<LionOptions>(LionOptions(0.5).weight_decay(1)));
  Lion lion(groups, LionOptions(0.25));
  a.mutable_grad() = b.mutable_grad() = torch::ones({4});
  lion.step();
  EXPECT_FLOAT_EQ(a[0].item<float>(), 1 - 1e-4F);
  EXPECT_FLOAT_EQ(b[0].item<float>(), 0.0F) << "halved by decay, then by the rate";
}

/// Of codes 0 .. 255: values between which fp32 numbers are rounded, computed as the books of codes are.
std::vector<float> middles_of(const at::Tensor& tree) {
  std::vector<float> middles;
  for (int64_t i = 0; i < 255; ++i) middles.push_back(static_cast<float>((tree[i].item<double>() + tree[i + 1].item<double>()) / 2));
  return middles;
}

// The vectorised search against the definition, in fp32: at every middle, beside it, and at numbers of all sizes; on several instruction
// widths' tails. With betas of 0 the moments are the gradient and its square.
TEST(Rules, PackedMomentsHaveTheNearestCode) {
  torch::manual_seed(11);
  const std::vector<float> first = middles_of(reference::dynamic_code(true)), second = middles_of(reference::dynamic_code(false));
  std::vector<float> special{0.0F, -0.0F, 1e-30F, -1e-30F, 1.0F, 2e-7F, -2e-7F, 0.999F, std::nextafter(1.0F, 0.0F)};
  for (const float m : first) special.insert(special.end(), {m, std::nextafter(m, 2.0F), std::nextafter(m, -2.0F)});
  for (const float m : second) special.insert(special.end(), {std::sqrt(m), std::nextafter(std::sqrt(m), 2.0F), std::nextafter(std::sqrt(m), 0.0F)});
  at::Tensor grad = torch::rand({4096 * 5 + 77}).mul(-18).exp2() * torch::randn({4096 * 5 + 77}).sign();
  for (size_t i = 0; i < special.size(); ++i) grad[static_cast<int64_t>(i)] = special[i];
  for (int64_t block = 0; block < grad.numel(); block += 256) grad[block] = -1.0F;  // the scale
  grad.narrow(0, 256 * 40, 256).zero_();
  const auto moment = [&] { return QuantMoment{torch::zeros(grad.numel(), torch::kByte), torch::zeros({(grad.numel() + 255) / 256})}; };
  const QuantMoment m = moment(), v = moment();
  adam8bit_update({.lr = 1e-3, .beta1 = 0, .beta2 = 0, .eps = 1e-8, .weight_decay = 0, .step = 1}, torch::zeros_like(grad), grad, m, v, {});
  const auto nearest = [](const std::vector<float>& middles, float x) { return std::lower_bound(middles.begin(), middles.end(), x) - middles.begin(); };
  std::set<int64_t> seen_m, seen_v;
  for (int64_t i = 0; i < grad.numel(); ++i) {
    const auto x = grad[i].item<float>(), square = x * x;
    ASSERT_EQ(m.codes[i].item<int64_t>(), nearest(first, x)) << x;
    ASSERT_EQ(v.codes[i].item<int64_t>(), square > 0 ? std::max<int64_t>(1, nearest(second, square)) : 0) << x;
    seen_m.insert(m.codes[i].item<int64_t>());
    seen_v.insert(v.codes[i].item<int64_t>());
  }
  EXPECT_GT(seen_m.size(), 250U);
  EXPECT_GT(seen_v.size(), 250U);
  EXPECT_EQ(m.scales[0].item<float>(), 1.0F);
  EXPECT_EQ(m.scales[40].item<float>(), 0.0F);
}

// A moment that underflowed to zero would let eps alone divide the step.
TEST(Rules, PackedSecondMomentsAboveZeroStayAboveZero) {
  at::Tensor p = torch::zeros({4096}).requires_grad_();
  Adam8bit optimizer({OptimizerParamGroup({p})}, AdamWOptions(1e-3).betas({0.9, 0.99}).weight_decay(0));
  for (int step = 0; step < 50; ++step) {
    p.mutable_grad() = torch::full({4096}, step == 0 ? 1e-4F : 0.0F);
    p.mutable_grad()[0] = 1.0F;
    optimizer.step();
  }
  EXPECT_LE(p.detach().abs().max().item<float>(), 50 * 1.1e-3F);
}

}  // namespace
}  // namespace weft::optim
