// Accounts by category: allocations, frees, peaks, moves, limits, meta tensors. Each test is a process of its own under
// CTest, and installs for itself.
#include "weft/memory/account.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <numeric>
#include <thread>

#include "weft/memory/cpu_allocator.h"
#include "weft/memory/table.h"

namespace weft::memory {
namespace {

using ::testing::HasSubstr;

int64_t sum(const Amounts& amounts) { return std::accumulate(amounts.begin(), amounts.end(), int64_t{0}); }
Amounts difference(const Amounts& a, const Amounts& b) {
  Amounts d;
  for (size_t i = 0; i < kCategories; ++i) d[i] = a[i] - b[i];
  return d;
}

torch::Tensor bytes(int64_t n, at::Device device = at::kCPU) {
  return torch::empty({n}, torch::TensorOptions().dtype(torch::kByte).device(device));
}

TEST(Account, NothingIsCountedBeforeInstallation) {
  const Scope scope(Category::gradients);
  const auto tensor = bytes(1000);
  const Booking booking(5000, Category::communication);
  EXPECT_EQ(usage().live, 0);
  EXPECT_EQ(usage().allocations, 0);
}

TEST(Account, AFreeIsBookedToTheCategoryOfTheAllocation) {
  install_cpu_allocator();
  const Usage start = usage();
  torch::Tensor a, b;
  {
    const Scope scope(Category::parameters);
    a = bytes(1000);
    {
      const Scope inner(Category::gradients);
      b = bytes(300);
    }
    EXPECT_EQ(current_category(), Category::parameters);
  }
  EXPECT_EQ(current_category(), Category::other);
  std::thread([&] {
    const Scope scope(Category::activations);
    a.reset();
  }).join();
  EXPECT_EQ(usage().of(Category::parameters), start.of(Category::parameters));
  EXPECT_EQ(usage().of(Category::activations), start.of(Category::activations));
  EXPECT_EQ(usage().of(Category::gradients), 300);
  EXPECT_EQ(usage().peak_by(Category::parameters), 1000);
}

TEST(Account, PeaksAreOfTheirMoments) {
  install_cpu_allocator();
  const Usage start = usage();
  reset_peak();
  {
    const Scope scope(Category::activations);
    bytes(5000);
  }
  {
    const Scope scope(Category::gradients);
    const auto grads = bytes(1000);
    const Scope inner(Category::activations);
    bytes(4500);  // own peak of activations stays 5000; the whole's is here
  }
  const Usage end = usage();
  EXPECT_EQ(end.peak - start.live, 5500);
  EXPECT_EQ(sum(end.at_peak), end.peak);
  EXPECT_EQ(sum(end.live_of), end.live);
  EXPECT_EQ(difference(end.at_peak, start.live_of), (Amounts{0, 1000, 0, 4500, 0, 0}));
  EXPECT_EQ(difference(end.peak_of, start.live_of), (Amounts{0, 1000, 0, 5000, 0, 0}));
  reset_peak();
  EXPECT_EQ(usage().peak, usage().live);
}

TEST(Account, RebookingMovesLiveBytes) {
  install_cpu_allocator();
  const auto foreign = torch::from_blob(new char[8], {8}, [](void* p) { delete[] static_cast<char*>(p); }, torch::kByte);
  auto tensor = [] {
    const Scope scope(Category::activations);
    return bytes(700);
  }();
  rebook(tensor, Category::gradients);
  rebook(foreign, Category::gradients);
  rebook(torch::Tensor(), Category::gradients);
  EXPECT_EQ(usage().of(Category::activations), 0);
  EXPECT_EQ(usage().of(Category::gradients), 700);
  tensor.reset();
  EXPECT_EQ(usage().of(Category::gradients), 0);
}

TEST(Account, ThreadsAddUpExactly) {
  install_cpu_allocator();
  const int64_t live = usage().live, allocations = usage().allocations;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      const Scope scope(Category::activations);
      for (int i = 0; i < 1000; ++i) bytes(100 + i);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(usage().live, live);
  EXPECT_EQ(usage().of(Category::activations), 0);
  EXPECT_EQ(usage().allocations, allocations + 4000);
}

TEST(Account, AnAllocationAboveTheLimitSaysWhatItWasFor) {
  install_cpu_allocator();
  const int64_t live = usage().live;
  set_limit(live + 1'000'000);
  const Scope scope(Category::activations);
  const auto fits = bytes(900'000);
  try {
    bytes(200'000);
    FAIL() << "no error";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.asked, 200'000);
    EXPECT_EQ(error.category, Category::activations);
    EXPECT_EQ(error.usage.of(Category::activations), 900'000);
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("no room for 195 KiB of activations"));
  }
  EXPECT_EQ(usage().live, live + 900'000) << "what was refused is not booked";
  set_limit(0);
  EXPECT_NO_THROW(bytes(2'000'000));
}

/// More than any machine has: the system itself refuses.
TEST(Account, TheSystemsRefusalIsTheSameError) {
  install_cpu_allocator();
  const int64_t live = usage().live;
  EXPECT_THROW(bytes(int64_t{1} << 46), c10::OutOfMemoryError);
  EXPECT_EQ(usage().live, live);
}

/// The same program on either device: a classifier with two layers, loss and backward.
Usage train_step(at::Device device, Space space) {
  torch::manual_seed(1);
  torch::Tensor w1, w2, x;
  {
    const Scope scope(Category::parameters);
    w1 = torch::ones({32, 16}, device).requires_grad_();
    w2 = torch::ones({8, 32}, device).requires_grad_();
  }
  reset_peak(space);
  const Scope scope(Category::activations);
  x = torch::ones({64, 16}, device);
  const auto out = torch::log_softmax(torch::gelu(x.matmul(w1.t())).matmul(w2.t()), 1);
  (out * out).mean().backward();
  rebook(w1.grad(), Category::gradients);
  rebook(w2.grad(), Category::gradients);
  return usage(space);
}

TEST(Account, MetaTensorsAreCountedLikeRealOnes) {
  install_cpu_allocator();
  install_meta_counter();
  const Usage before = usage();
  train_step(at::kCPU, Space::cpu);  // libtorch's own first-use allocations
  const Usage idle = usage();
  EXPECT_EQ(idle.live, before.live) << "nothing is left behind";
  const Usage real = train_step(at::kCPU, Space::cpu);
  const Usage meta = train_step(at::kMeta, Space::meta);
  EXPECT_EQ(real.of(Category::parameters), (32 * 16 + 8 * 32) * 4);
  EXPECT_EQ(real.of(Category::gradients), (32 * 16 + 8 * 32) * 4);
  EXPECT_EQ(difference(real.live_of, before.live_of), meta.live_of);
  EXPECT_EQ(difference(real.at_peak, before.live_of), meta.at_peak);
  EXPECT_EQ(real.peak - before.live, meta.peak);
  EXPECT_GT(meta.peak, 2 * 64 * 32 * 4);
  EXPECT_EQ(usage(Space::meta).live, 0);
}

TEST(Account, TableShowsEveryCategoryAndTheTotal) {
  const std::string text = table("at the peak", {{"rank 0", {1024, 2048, 4096, 0, 0, 0}}, {"rank 1", {0, 0, 0, 0, 0, 1 << 30}}});
  EXPECT_EQ(text,
            "at the peak    parameters     gradients     optimizer   activations communication         other         total\n"
            "rank 0              1 KiB         2 KiB         4 KiB           0 B           0 B           0 B         7 KiB\n"
            "rank 1                0 B           0 B           0 B           0 B           0 B         1 GiB         1 GiB\n");
}

}  // namespace
}  // namespace weft::memory
