#include "weft/comm/local/local.h"

#include "weft/comm/local/engine.h"

namespace weft::local {

std::vector<std::shared_ptr<LocalWorld>> LocalWorld::in_process(int size) {
  std::vector<std::shared_ptr<LocalWorld>> worlds;
  for (auto& engine : Engine::in_process(size)) worlds.push_back(std::shared_ptr<LocalWorld>(new LocalWorld(std::move(engine))));
  return worlds;
}

std::shared_ptr<LocalWorld> LocalWorld::join(const std::string& key, int rank, int size, std::chrono::milliseconds timeout) {
  return std::shared_ptr<LocalWorld>(new LocalWorld(Engine::join(key, rank, size, timeout)));
}

LocalWorld::~LocalWorld() = default;

int LocalWorld::rank() const { return engine_->rank(); }
int LocalWorld::size() const { return engine_->size(); }

void LocalWorld::abort(int culprit, const std::string& reason) {
  RankSet culprits;
  if (culprit >= 0 && culprit < size()) culprits.set(static_cast<size_t>(culprit));
  engine_->abort(culprits, reason);
}

std::optional<Abort> LocalWorld::aborted() const {
  if (!engine_->aborted()) return std::nullopt;
  Abort abort{.culprits = {}, .reason = engine_->abort_reason()};
  const RankSet culprits = engine_->culprits();
  for (int r = 0; r < size(); ++r) {
    if (culprits[static_cast<size_t>(r)]) abort.culprits.push_back(r);
  }
  return abort;
}

c10::intrusive_ptr<LocalGroup> LocalWorld::create_group(std::vector<int> world_ranks, std::string name,
                                                        std::chrono::milliseconds timeout) {
  auto group = engine_->create_group(std::move(world_ranks), std::move(name), timeout);
  auto handle = c10::make_intrusive<LocalGroup>(engine_, std::move(group));
  handle->setTimeout(timeout);
  return handle;
}

// --- LocalWork -------------------------------------------------------------------------------------------------------------

LocalWork::LocalWork(std::shared_ptr<Engine> engine, std::shared_ptr<Op> op, c10d::OpType type, std::vector<at::Tensor> outputs)
    : c10d::Work(engine->rank(), type), engine_(std::move(engine)), op_(std::move(op)), outputs_(std::move(outputs)) {}

bool LocalWork::test() { return engine_->test(*op_, Until::complete); }

bool LocalWork::test_released() { return engine_->test(*op_, Until::released); }

bool LocalWork::wait(std::chrono::milliseconds timeout) {
  engine_->wait(*op_, Until::complete, timeout);
  return true;
}

void LocalWork::wait_released(std::chrono::milliseconds timeout) { engine_->wait(*op_, Until::released, timeout); }

bool LocalWork::isCompleted() {
  if (failure_) return true;
  try {
    return test();
  } catch (...) {
    failure_ = std::current_exception();
    return true;
  }
}

bool LocalWork::isSuccess() const { return op_->complete; }

std::exception_ptr LocalWork::exception() const { return failure_; }

uint64_t LocalWork::getSequencenumber() const { return op_->sequence; }

c10::intrusive_ptr<c10::ivalue::Future> LocalWork::getFuture() {
  wait();
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

}  // namespace weft::local
