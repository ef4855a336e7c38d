// Updates in one pass over one flat tensor, AdamW also against libtorch's. Figures: bytes that must move per second.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include "weft/optim/kernels.h"

namespace {

constexpr int64_t kNumel = int64_t{10} << 20;
constexpr weft::optim::AdamWStep kStep{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 3};

struct Tensors {
  at::Tensor weight = at::randn({kNumel}), grad = at::randn({kNumel}), m = at::zeros({kNumel}), v = at::zeros({kNumel});
};

void count(benchmark::State& state, int64_t bytes_per_element) { state.SetBytesProcessed(state.iterations() * kNumel * bytes_per_element); }

void weft_fp32(benchmark::State& state) {
  const Tensors t;
  for (auto _ : state) weft::optim::adamw_update(kStep, t.weight, t.grad, t.m, t.v, {});
  count(state, 28);
}

void weft_bf16_gradient_and_copy(benchmark::State& state) {
  const Tensors t;
  const at::Tensor grad = t.grad.to(at::kBFloat16), copy = at::empty({kNumel}, at::kBFloat16);
  for (auto _ : state) weft::optim::adamw_update(kStep, t.weight, grad, t.m, t.v, copy);
  count(state, 28);
}

void weft_bf16_moments(benchmark::State& state) {
  const Tensors t;
  const at::Tensor m = t.m.to(at::kBFloat16), v = t.v.to(at::kBFloat16);
  for (auto _ : state) weft::optim::adamw_update(kStep, t.weight, t.grad, m, v, {});
  count(state, 20);
}

void weft_8bit_moments(benchmark::State& state) {
  const Tensors t;
  const auto moment = [] { return weft::optim::QuantMoment{at::zeros({kNumel}, at::kByte), at::zeros({kNumel / weft::optim::kQuantBlock})}; };
  const weft::optim::QuantMoment m = moment(), v = moment();
  for (auto _ : state) weft::optim::adam8bit_update(kStep, t.weight, t.grad, m, v, {});
  count(state, 16);
}

void weft_lion(benchmark::State& state) {
  const Tensors t;
  for (auto _ : state) weft::optim::lion_update({.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 1}, t.weight, t.grad, t.m, {});
  count(state, 20);
}

void weft_sgd(benchmark::State& state) {
  const Tensors t;
  const weft::optim::SgdStep step{.lr = 1e-2, .momentum = 0.9, .dampening = 0, .weight_decay = 1e-4};
  for (auto _ : state) weft::optim::sgd_update(step, t.weight, t.grad, t.m, {});
  count(state, 20);
}

void torch_fused(benchmark::State& state) {
  Tensors t;
  const at::Tensor step = at::full({}, 3.0F);
  std::vector<at::Tensor> w{t.weight}, g{t.grad}, m{t.m}, v{t.v};
  for (auto _ : state) {
    at::_fused_adamw_(w, g, m, v, {}, {step}, 1e-3, 0.9, 0.95, 0.1, 1e-8, false, false);
  }
  count(state, 28);
}

BENCHMARK(weft_fp32)->Unit(benchmark::kMillisecond);
BENCHMARK(weft_bf16_gradient_and_copy)->Unit(benchmark::kMillisecond);
BENCHMARK(weft_bf16_moments)->Unit(benchmark::kMillisecond);
BENCHMARK(weft_8bit_moments)->Unit(benchmark::kMillisecond);
BENCHMARK(weft_lion)->Unit(benchmark::kMillisecond);
BENCHMARK(weft_sgd)->Unit(benchmark::kMillisecond);
BENCHMARK(torch_fused)->Unit(benchmark::kMillisecond);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
