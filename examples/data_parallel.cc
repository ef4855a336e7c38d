// An existing libtorch loop made data parallel: the lines marked + are new.
//   example_data_parallel                         alone
//   weft run -n 3 -- example_data_parallel        the same numbers on three ranks; torchrun, srun and mpirun work, too
#include <torch/torch.h>
#include <weft/weft.h>  // +

#include <cmath>
#include <cstdio>

// Points of a curve: x -> (sin 3x, cos 2x).
struct Curve : torch::data::datasets::Dataset<Curve> {
  torch::data::Example<> get(size_t i) override {
    const double x = 2.0 * static_cast<double>(i) / kPoints - 1.0;
    return {torch::tensor({x}, torch::kDouble), torch::tensor({std::sin(3 * x), std::cos(2 * x)}, torch::kDouble)};
  }
  std::optional<size_t> size() const override { return kPoints; }
  static constexpr size_t kPoints = 205;  // the last batch is not full, and on three ranks not even
};

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential layers{torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 2)};
  NetImpl() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
};
TORCH_MODULE(Net);

int main() {
  auto world = weft::World::init();                                                               // +
  auto dataset = Curve().map(torch::data::transforms::Stack<>());
  auto data = weft::data::loader(dataset, world.comm(), {.batch = 60 / world.size(), .seed = 1});  // +
  torch::manual_seed(1);
  Net net;
  net->to(torch::kDouble);
  weft::DataParallel dp(net, world.comm());                                                       // +
  torch::optim::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int epoch = 1; epoch <= 5; ++epoch) {
    auto total = torch::zeros({}, torch::kDouble);
    for (auto& batch : *data) {
      opt.zero_grad();
      auto loss_sum = (net(batch.data) - batch.target).square().sum();
      weft::global_mean(loss_sum, batch.data.size(0), dp).backward();                             // + the mean over all ranks' rows
      dp.clip_grad_norm(1.0);                                                                     // +
      opt.step();
      total += loss_sum.detach();
    }
    world.comm().all_reduce(total).wait();                                                        // +
    if (world.rank() == 0) std::printf("epoch %d: loss %.12f\n", epoch, total.item<double>() / Curve::kPoints);
  }
}
