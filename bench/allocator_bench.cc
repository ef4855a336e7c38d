// What counting costs: one allocation and free of a small and of a large tensor, with libtorch's allocator and with Weft's.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "weft/memory/cpu_allocator.h"

namespace {

void allocate(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(at::empty({state.range(0)}, at::kByte));
}

void book(benchmark::State& state) {
  weft::memory::Account account;
  for (auto _ : state) {
    account.try_add(1000, weft::memory::Category::activations);
    account.remove(1000, weft::memory::Category::activations);
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  benchmark::RegisterBenchmark("book_and_release", book);
  benchmark::RegisterBenchmark("libtorch", allocate)->Arg(1000)->Arg(1 << 20);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::ClearRegisteredBenchmarks();
  weft::install_cpu_allocator();
  benchmark::RegisterBenchmark("weft", allocate)->Arg(1000)->Arg(1 << 20);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
