// How soon an abort is known: counted in looks at the store, so that the load of the machine does not matter.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "weft/comm/failure_look.h"
#include "weft/comm/local/patience.h"
#include "weft/comm/pulse.h"

namespace weft::detail {
namespace {

using std::chrono::milliseconds;

// What is promised for an abort is a second: most of it is left to a loaded machine.
static_assert(4 * kFailureLook < std::chrono::seconds(1));
static_assert(local::Patience::kSlice <= kFailureLook);

using Bytes = std::vector<uint8_t>;

/// One rank's connection to a store that all ranks share. Counts the looks at the key of the failure once it is there.
class CountingStore final : public c10d::Store {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> shared) : shared_(std::move(shared)) {}

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override { return shared_->clone(); }
  void set(const std::string& key, const Bytes& value) override { shared_->set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& now, const Bytes& then) override {
    return shared_->compareSet(key, now, then);
  }
  Bytes get(const std::string& key) override { return shared_->get(key); }
  int64_t add(const std::string& key, int64_t value) override { return shared_->add(key, value); }
  bool deleteKey(const std::string& key) override { return shared_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override {
    const bool there = shared_->check(keys);
    if (keys == std::vector<std::string>{"failure"}) ++(there ? looks_that_told : looks_before);
    return there;
  }
  int64_t getNumKeys() override { return shared_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { shared_->wait(keys); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override { shared_->wait(keys, timeout); }

  std::atomic<int> looks_before{0}, looks_that_told{0};

 private:
  c10::intrusive_ptr<c10d::Store> shared_;
};

/// Stands for a group with a call in flight that only abort() ends.
struct Stuck final : c10d::Backend {
  Stuck() : c10d::Backend(1, 2) {}
  const std::string getBackendName() const override { return "stuck"; }
  void abort() override { ended = true; }
  std::atomic<bool> ended{false};
};

// The ranks are nowhere inside a call: the thread of the pulse finds out, at its first look, and ends what waits in the same turn.
TEST(Pulse, TheFirstLookAfterAnAbortTellsAndEndsWhatWaits) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  const auto watched = c10::make_intrusive<CountingStore>(shared);
  const auto group = c10::make_intrusive<Stuck>();
  Pulse first(shared, 0, 2, -1), second(watched, 1, 2, -1);
  second.end_with_world(group);
  while (watched->looks_before == 0) std::this_thread::yield();
  first.fail({{0}, "the disk is full"});
  while (!group->ended) std::this_thread::yield();
  ASSERT_TRUE(second.failure());
  EXPECT_EQ(second.failure()->reason, "the disk is full");
  EXPECT_EQ(second.failure()->culprits, std::vector<int>{0});
  EXPECT_EQ(watched->looks_that_told, 1);
}

}  // namespace
}  // namespace weft::detail
