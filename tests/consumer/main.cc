#include <torch/torch.h>
#include <weft/weft.h>

int main() {
  auto world = weft::World::init();
  torch::nn::Linear net(2, 1);
  weft::DataParallel dp(net, world.comm());
  net(torch::full({1, 2}, world.rank() + 1.0)).sum().backward();
  const double expected = (world.size() + 1.0) / 2;
  return net->weight.grad()[0][0].item<double>() == expected ? 0 : 1;
}
