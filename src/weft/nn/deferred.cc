#include "weft/nn/deferred.h"

#include <torch/library.h>

#include <optional>

#include "weft/core/error.h"
#include "weft/nn/call_log.h"
#include "weft/nn/start_values.h"

namespace weft {
namespace nn {
namespace {

/// libtorch's key for modes that see each call first; nothing in it uses this one.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local CallLog* current = nullptr;

void record_call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  current != nullptr ? current->call(op, *stack) : op.callBoxed(*stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record_call>());
}

}  // namespace

struct DeferredScope::State {
  explicit State(uint64_t seed) : log(std::make_shared<CallLog>(seed)), outer(current) {
    current = log.get();
    include.emplace(kKey);
  }
  ~State() { current = outer; }

  std::shared_ptr<CallLog> log;
  CallLog* outer;
  std::optional<c10::impl::IncludeDispatchKeyGuard> include;
};

DeferredScope::DeferredScope(uint64_t seed) : state_(std::make_unique<State>(seed)) {}
DeferredScope::~DeferredScope() = default;

void DeferredScope::finish(torch::nn::Module& module) {
  state_->include.reset();
  const auto parameters = module.named_parameters(), buffers = module.named_buffers();
  for (const auto* list : {&parameters, &buffers}) {
    for (const auto& item : *list) state_->log->name_tensor(item.key(), item.value());
  }
  for (const auto* list : {&parameters, &buffers}) {
    for (const auto& item : *list) {
      if (auto values = state_->log->values_of(item.value())) set_start_values(item.value(), std::move(values));
    }
  }
}

}  // namespace nn

void materialise(torch::nn::Module& module) {
  const auto parameters = module.named_parameters(), buffers = module.named_buffers();
  for (const auto* list : {&parameters, &buffers}) {
    for (const auto& item : *list) {
      nn::materialise(item.value());
      if (item.value().is_meta()) throw ConfigError("'" + item.key() + "' " + nn::kNoValues);
    }
  }
}

}  // namespace weft
