// Does a program of yours compute the same on one rank and on several? weft::verify trains a few steps under each layout and compares.
//   example_verify_layouts                         ranks are threads of this process
//   weft run -n 2 -- example_verify_layouts        the layouts that fit two ranks, on processes
//   example_verify_layouts broken                  a mistake to find: exit code 1, and the tensor that is wrong first
#include <torch/torch.h>
#include <weft/weft.h>

#include <cstdio>
#include <string>

constexpr int64_t kWidth = 8, kTokens = 6;

// Norm, and an MLP that tensor-parallel ranks share out.
struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{nullptr};
  weft::Split<torch::nn::Linear> up{nullptr}, down{nullptr};
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", weft::Split<torch::nn::Linear>(kWidth, 4 * kWidth));
    down = register_module("down", weft::Split<torch::nn::Linear>(4 * kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  weft::Unit<Block> first{nullptr}, second{nullptr};
  NetImpl() {
    first = register_module("first", weft::Unit<Block>());
    second = register_module("second", weft::Unit<Block>());
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }  // [B, T, 8], or this rank's part of T
};
TORCH_MODULE(Net);

weft::VerifyProgram make_model(const weft::VerifyRanks& ranks, bool broken) {
  Net net = weft::deferred([] { return Net(); }, {.seed = 1});
  weft::TensorPlan plan{{"*.up", weft::TensorStyle::column}, {"*.down", weft::TensorStyle::row}};
  // Norms see a part of the sequence, and their gradients are summed over the ranks; the mistake is to forget one.
  if (ranks.sequence_parallel) plan.push_back({broken ? "first.norm" : "*.norm", weft::TensorStyle::sequence});
  weft::parallelize(*net, ranks.tp, plan);
  const auto part = [ranks](const torch::Tensor& x) { return ranks.sequence_parallel ? x.chunk(ranks.tp.size(), 1)[static_cast<size_t>(ranks.tp.rank())] : x; };
  const auto loss_sum = [net, part](const std::vector<torch::Tensor>& batch) mutable { return (net(part(batch[0])) - part(batch[1])).square().sum(); };
  return {.module = net.ptr(), .loss_sum = loss_sum, .loss_of_part = ranks.sequence_parallel};
}

int main(int argc, char** argv) {
  const bool broken = argc > 1 && std::string(argv[1]) == "broken";
  auto world = weft::World::init();
  const auto make_batch = [](int64_t step) -> std::vector<torch::Tensor> {
    const auto x = torch::sin(torch::arange(4 * kTokens * kWidth, torch::kDouble) + static_cast<double>(step)).view({4, kTokens, kWidth});
    return {x, x.square()};
  };
  const std::string layouts = world.size() > 1 ? "dp=2; tp=2; tp=2,sequence_parallel=true"
                                               : "dp=2; tp=2; tp=2,sequence_parallel=true; dp_shard=2,zero=3,tp=2; dp=4,dp_shard=2,zero=3,tp=2,micro_batch=1";
  weft::VerifyOptions options;
  options.world = world;
  const auto report = weft::verify([&](const weft::VerifyRanks& ranks) { return make_model(ranks, broken); }, make_batch, layouts, options);
  if (world.rank() == 0) std::printf("%s", weft::to_text(report).c_str());
  return report.ok() ? 0 : 1;
}
