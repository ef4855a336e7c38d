#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "weft/comm/local/links.h"

namespace weft::local {
namespace {

struct Hub {
  std::mutex mutex;
  std::condition_variable arrived;
  std::map<std::pair<int, int>, std::deque<Parcel>> boxes;  // (from, to)
};

class ThreadLinks : public Links {
 public:
  ThreadLinks(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  bool send(int peer, const Parcel& parcel) override {
    {
      std::lock_guard lock(hub_->mutex);
      hub_->boxes[{rank_, peer}].push_back(parcel);
    }
    hub_->arrived.notify_all();
    return true;
  }

  bool receive(int peer, std::chrono::milliseconds patience, Parcel& parcel) override {
    std::unique_lock lock(hub_->mutex);
    auto& box = hub_->boxes[{peer, rank_}];
    if (!hub_->arrived.wait_for(lock, patience, [&] { return !box.empty(); })) return false;
    parcel = std::move(box.front());
    box.pop_front();
    return true;
  }

  RankSet closed() override { return {}; }
  bool separate_mappings() const override { return false; }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Links>> thread_links(int size) {
  auto hub = std::make_shared<Hub>();
  std::vector<std::unique_ptr<Links>> links;
  for (int r = 0; r < size; ++r) links.push_back(std::make_unique<ThreadLinks>(hub, r));
  return links;
}

}  // namespace weft::local
