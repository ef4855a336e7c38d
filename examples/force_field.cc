// A force field: the network gives the energy of a molecule, its derivative by the positions the forces, and both are fitted.
// The loss holds a gradient, so that backward() differentiates twice; nothing special has to be done for that.
//   weft run -n 2 -- example_force_field
#include <torch/torch.h>
#include <weft/weft.h>  // +

#include <cstdio>

// Chains of 4 atoms on a line of springs, displaced: energy = sum of (distance - 1)^2 over neighbours.
struct Chains : torch::data::datasets::Dataset<Chains> {
  torch::data::Example<> get(size_t i) override {
    auto rest = torch::zeros({4, 3}, torch::kDouble);
    rest.select(1, 0) = torch::arange(4, torch::kDouble);
    return {rest + 0.2 * torch::sin(torch::arange(12, torch::kDouble).view({4, 3}) * static_cast<double>(i + 1)), torch::empty({0})};
  }
  std::optional<size_t> size() const override { return kChains; }
  static constexpr size_t kChains = 61;
};

torch::Tensor pair_distances(const torch::Tensor& r) {  // [B, 4, 3] -> [B, 6]
  const auto from = torch::tensor({0, 0, 0, 1, 1, 2}), to = torch::tensor({1, 2, 3, 2, 3, 3});
  return (r.index_select(1, from) - r.index_select(1, to)).square().sum(2).sqrt();
}

torch::Tensor true_energy(const torch::Tensor& r) {  // [B]
  return (r.narrow(1, 1, 3) - r.narrow(1, 0, 3)).square().sum(2).sqrt().sub(1.0).square().sum(1);
}

// -d energy / d positions, itself differentiable if asked for.
torch::Tensor forces(const torch::Tensor& energy, const torch::Tensor& r, bool differentiable) {
  return -torch::autograd::grad({energy.sum()}, {r}, {}, /*retain_graph=*/true, /*create_graph=*/differentiable)[0];
}

int main() {
  auto world = weft::World::init();                                                               // +
  auto dataset = Chains().map(torch::data::transforms::Stack<>());
  auto data = weft::data::loader(dataset, world.comm(), {.batch = 12 / world.size(), .seed = 1});  // +
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(6, 32), torch::nn::SiLU(), torch::nn::Linear(32, 1));
  net->to(torch::kDouble);
  weft::DataParallel dp(net, world.comm());                                                       // +
  torch::optim::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int epoch = 1; epoch <= 10; ++epoch) {
    auto total = torch::zeros({}, torch::kDouble);
    for (auto& batch : *data) {
      opt.zero_grad();
      const auto r = batch.data.clone().requires_grad_();
      const auto energy = net->forward(pair_distances(r)).squeeze(1), wanted = true_energy(r);
      auto loss_sum = (energy - wanted.detach()).square().sum() +
                      (forces(energy, r, true) - forces(wanted, r, false)).square().sum();
      weft::global_mean(loss_sum, batch.data.size(0), dp).backward();                             // +
      opt.step();
      total += loss_sum.detach();
    }
    world.comm().all_reduce(total).wait();                                                        // +
    if (world.rank() == 0) std::printf("epoch %d: loss %.12f\n", epoch, total.item<double>() / Chains::kChains);
  }
}
