// A convolutional network with batch normalisation, from an ordinary libtorch loop: the lines marked + are new. The argument is
// the position of the dial: 0 (DDP, the default) to 3 (ZeRO-3: the Units' parameters are sharded).
//   weft run -n 2 -- example_conv_batch_norm 3
#include <torch/torch.h>
#include <weft/weft.h>  // +

#include <cstdio>
#include <cstdlib>

// Pictures of 8 x 8 with a bar that lies (class 0) or stands (class 1), and noise.
struct Bars : torch::data::datasets::Dataset<Bars> {
  torch::data::Example<> get(size_t i) override {
    auto picture = torch::sin(torch::arange(64, torch::kDouble) * static_cast<double>(i + 1)).view({1, 8, 8});
    const auto place = static_cast<int64_t>(i / 2 % 8), kind = static_cast<int64_t>(i % 2);
    picture.narrow(kind == 0 ? 1 : 2, place, 1) += 1.0;
    return {picture, torch::tensor(kind)};
  }
  std::optional<size_t> size() const override { return kPictures; }
  static constexpr size_t kPictures = 73;  // the last batch holds one picture: on other ranks it has no rows
};

struct StemImpl : torch::nn::Module {
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 8, 3).bias(false)};
  weft::nn::SyncBatchNorm norm;                                                                   // + was torch::nn::BatchNorm2d
  explicit StemImpl(const weft::Comm& comm) : norm(8, comm) {
    register_module("conv", conv);
    register_module("norm", norm);
  }
  torch::Tensor forward(torch::Tensor x) { return torch::relu(norm(conv(x))); }                   // [B, 1, 8, 8] -> [B, 8, 6, 6]
};
TORCH_MODULE(Stem);

struct NetImpl : torch::nn::Module {
  weft::Unit<Stem> stem;                                                                          // + was Stem
  weft::Unit<torch::nn::Conv2d> conv{torch::nn::Conv2dOptions(8, 8, 3)};                          // + was torch::nn::Conv2d
  torch::nn::Linear head{8, 2};
  explicit NetImpl(const weft::Comm& comm) : stem(comm) {
    register_module("stem", stem);
    register_module("conv", conv);
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) {                                                        // [B, 1, 8, 8] -> [B, 2]
    return head(torch::relu(conv(stem(x))).amax({2, 3}));
  }
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  auto world = weft::World::init();                                                               // +
  auto dataset = Bars().map(torch::data::transforms::Stack<>());
  auto data = weft::data::loader(dataset, world.comm(), {.batch = 12 / world.size(), .seed = 1});  // +
  torch::manual_seed(1);
  Net net(world.comm());
  net->to(torch::kDouble);
  weft::DataParallel dp(net, world.comm(), {.sharding = weft::sharding_of_zero(argc > 1 ? std::atoi(argv[1]) : 0)});  // +
  std::vector<torch::Tensor> shards;                                                              // + was net->parameters()
  for (const auto& shard : dp.shards()) shards.push_back(shard.tensor);                           // +
  torch::optim::SGD opt(shards, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int epoch = 1; epoch <= 5; ++epoch) {
    auto total = torch::zeros({2}, torch::kDouble);  // loss, right answers
    for (auto& batch : *data) {
      dp.zero_grad();                                                                             // + was opt.zero_grad()
      auto out = net(batch.data);
      auto loss_sum = torch::nn::functional::cross_entropy(out, batch.target, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      weft::global_mean(loss_sum, batch.data.size(0), dp).backward();                             // +
      dp.step(opt);                                                                               // + was opt.step()
      total += torch::stack({loss_sum.detach(), out.argmax(1).eq(batch.target).sum().to(torch::kDouble)});
    }
    world.comm().all_reduce(total).wait();                                                        // +
    total /= static_cast<double>(Bars::kPictures);
    if (world.rank() == 0) std::printf("epoch %d: loss %.12f, right %.2f\n", epoch, total[0].item<double>(), total[1].item<double>());
  }
}
