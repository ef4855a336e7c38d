#include "bench/collectives/memory_limits.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace weft::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<int> usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  ::sched_setaffinity(0, sizeof set, &set);
}

/// Between threads that have a core each.
class SpinBarrier {
 public:
  explicit SpinBarrier(int threads) : threads_(threads) {}
  void wait() {
    const int turn = turn_.load();
    if (arrived_.fetch_add(1) == threads_ - 1) {
      arrived_.store(0);
      turn_.store(turn + 1);
    } else {
      while (turn_.load(std::memory_order_acquire) == turn) {
      }
    }
  }

 private:
  const int threads_;
  alignas(128) std::atomic<int> arrived_{0};
  alignas(128) std::atomic<int> turn_{0};
};

constexpr size_t kBlock = 1024;  // floats

/// Every rank's input and output, and what rank `me` has to do.
struct Buffers {
  std::vector<std::vector<float>> in, out;

  void run(const std::string& operation, int me) {
    const size_t n = in.size(), mine = static_cast<size_t>(me), count = in[mine].size();
    const size_t begin = count * mine / n, end = count * (mine + 1) / n;
    if (operation == "all_reduce" || operation == "reduce_scatter") {
      // In blocks that stay in the first-level cache, so that each input is read from memory once.
      for (size_t i = begin; i < end; i += kBlock) {
        const size_t length = std::min(kBlock, end - i);
        float sum[kBlock];
        std::memcpy(sum, in[0].data() + i, length * sizeof(float));
        for (size_t r = 1; r < n; ++r) {
          const float* more = in[r].data() + i;
          for (size_t k = 0; k < length; ++k) sum[k] += more[k];
        }
        for (size_t r = 0; r < n; ++r) {
          float* to = operation == "all_reduce" ? in[r].data() + i : out[mine].data() + (i - begin);
          std::memcpy(to, sum, length * sizeof(float));
          if (operation == "reduce_scatter") break;
        }
      }
    } else if (operation == "all_gather" || operation == "all_to_all") {
      for (size_t r = 0; r < n; ++r) {
        const size_t to = count * r / n, length = count * (r + 1) / n - to;
        std::memcpy(out[mine].data() + to, in[r].data() + (operation == "all_to_all" ? begin : 0), length * sizeof(float));
      }
    } else if (operation == "broadcast") {
      if (me > 0) std::memcpy(out[mine].data(), in[0].data(), count * sizeof(float));
    } else {  // send_recv, in a ring
      std::memcpy(out[mine].data(), in[(mine + n - 1) % n].data(), count * sizeof(float));
    }
  }
};

/// Seconds of one turn of all threads, the best of several batches: it is about what the machine can do.
double least_seconds(int threads, const std::function<void(int)>& body) {
  constexpr int kBatches = 7;
  constexpr double kBatchSeconds = 0.01;
  const auto cores = usable_cores();
  SpinBarrier barrier(threads);
  std::vector<double> times;
  std::atomic<int> turns{1};
  const auto run = [&](int me) {
    pin(cores[static_cast<size_t>(me)]);
    for (int batch = -1; batch < kBatches; ++batch) {  // the first one warms up and says how many turns make a batch
      barrier.wait();
      const auto start = Clock::now();
      const int count = turns.load();
      for (int i = 0; i < count; ++i) {
        barrier.wait();
        body(me);
        barrier.wait();
      }
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count() / count;
      barrier.wait();
      if (me == 0 && batch < 0) turns.store(std::max(1, static_cast<int>(kBatchSeconds / seconds)));
      if (me == 0 && batch >= 0) times.push_back(seconds);
      barrier.wait();
    }
  };
  std::vector<std::thread> others;
  for (int t = 0; t < threads; ++t) others.emplace_back(run, t);
  for (auto& thread : others) thread.join();
  return *std::min_element(times.begin(), times.end());
}

}  // namespace

double bus_factor(const std::string& operation, int ranks) {
  if (operation == "all_reduce") return 2.0 * (ranks - 1) / ranks;
  if (operation == "broadcast" || operation == "send_recv") return 1.0;
  return static_cast<double>(ranks - 1) / ranks;
}

std::optional<double> bus_limit(const std::string& operation, int64_t bytes, int ranks) {
  if (ranks > static_cast<int>(usable_cores().size()) || operation == "barrier") return std::nullopt;
  const auto count = static_cast<size_t>(std::max<int64_t>(bytes / static_cast<int64_t>(sizeof(float)), ranks));
  Buffers buffers;
  for (int r = 0; r < ranks; ++r) {
    buffers.in.emplace_back(count, 0.0f);
    buffers.out.emplace_back(operation == "all_reduce" ? 0 : count, 0.0f);
  }
  const double seconds = least_seconds(ranks, [&](int me) { buffers.run(operation, me); });
  return static_cast<double>(count * sizeof(float)) / seconds * bus_factor(operation, ranks) / 1e9;
}

std::optional<double> line_hop_ns() {
  if (usable_cores().size() < 2) return std::nullopt;
  constexpr int kHops = 10'000;
  struct alignas(128) Line {
    std::atomic<int> ball{0};
  };
  const auto line = std::make_unique<Line>();
  const double seconds = least_seconds(2, [&](int me) {
    for (int i = 0; i < kHops; ++i) {
      while (line->ball.load(std::memory_order_acquire) != me) {
      }
      line->ball.store(1 - me, std::memory_order_release);
    }
  });
  return seconds / (2 * kHops) * 1e9;
}

}  // namespace weft::bench
