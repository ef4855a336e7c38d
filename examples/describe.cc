// What does a network of one's own need on other machines? Counted once; then
//   weft plan --spec net.json --machine h100 --devices 8 --batch 4096
#include <torch/torch.h>
#include <weft/weft.h>

#include <cstdio>
#include <string>

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 32, 3).padding(1).bias(false)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(32, 64, 3).padding(1).stride(2).bias(false)));
    hidden = register_module("hidden", torch::nn::Linear(torch::nn::LinearOptions(64 * 16 * 16, 512).bias(false)));
    out = register_module("out", torch::nn::Linear(torch::nn::LinearOptions(512, 10).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv2(torch::relu(conv1(x))));
    return out(torch::relu(hidden(x.flatten(1))));
  }
};
TORCH_MODULE(Net);

// 8.6 billion parameters: more than this machine may hold, and never allocated.
struct WideImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  WideImpl() {
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(65536, 65536).bias(false)));
    second = register_module("second", torch::nn::Linear(torch::nn::LinearOptions(65536, 65536).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::tanh(first(x))); }
};
TORCH_MODULE(Wide);

weft::ProgramSpec describe_wide() {
  Wide net = weft::deferred([] { return Wide(); });
  return weft::describe(net, torch::zeros({8, 65536}, torch::kMeta));
}

weft::ProgramSpec describe_net(torch::Device device) {
  Net net = device.is_meta() ? weft::deferred([] { return Net(); }) : Net();
  return weft::describe(net, torch::zeros({8, 3, 32, 32}, device));
}

// describe FILE [wide | meta]
int main(int argc, char** argv) try {
  const std::string which = argc > 2 ? argv[2] : "";
  const weft::ProgramSpec spec = which == "wide" ? describe_wide() : describe_net(which == "meta" ? torch::kMeta : torch::kCPU);
  std::printf("parameters %.0f\nforward %.0f FLOPs, backward %.0f\nsaved %.0f bytes, peak %.0f\n", spec.parameters, spec.forward_flops, spec.backward_flops, spec.saved_bytes, spec.peak_bytes);
  if (argc > 1) weft::write_spec(spec, argv[1]);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
