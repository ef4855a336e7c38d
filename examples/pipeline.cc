// A Sequential over pipeline stages: no rank ever holds the whole model.
//   example_pipeline                         alone
//   weft run -n 3 -- example_pipeline        the same numbers from three stages (times two chunks)
#include <torch/torch.h>
#include <weft/weft.h>

#include <cstdio>

torch::nn::Sequential make_sequential() {
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(weft::Split<torch::nn::Linear>(i == 0 ? 2 : 24, 24));
    net->push_back(torch::nn::Tanh());
  }
  net->push_back(weft::Split<torch::nn::Linear>(24, 1));
  net->to(torch::kDouble);
  return net;
}

int main() {
  auto world = weft::World::init();
  weft::guard(world, [&] {
    const weft::Mesh mesh(world, {{"pp", world.size()}});
    auto seq = weft::deferred([] { return make_sequential(); }, {.seed = 1});
    auto stages = weft::cut(seq, mesh["pp"], {.chunks = 2});
    const auto loss_fn = [](const torch::Tensor& out, const torch::Tensor& target) { return torch::mse_loss(out, target); };
    weft::Pipeline pipe(std::move(stages), weft::schedule::interleaved(), mesh["pp"], loss_fn);
    torch::optim::Adam opt(pipe.module()->parameters(), torch::optim::AdamOptions(1e-2));
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});
    const torch::Tensor inputs = torch::rand({96, 2}, generator, torch::kDouble) * 2 - 1;
    const torch::Tensor targets = torch::sin(3 * inputs.sum(1, /*keepdim=*/true));
    for (int step = 1; step <= 30; ++step) {
      opt.zero_grad();
      auto result = pipe.step(inputs, targets, {.micro_batches = 8});  // loss equal on every rank
      opt.step();
      if (step % 5 == 0 && world.rank() == 0) std::printf("step %d: loss %.12f\n", step, result.loss);
    }
  });
}
