// weft::deferred: a module that exists by name and shape until somebody needs its values, or a part of them.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace weft {
namespace nn {

class CallLog;

/// While it lives, tensors that this thread makes have no memory, and what is done to them is recorded.
class DeferredScope {
 public:
  explicit DeferredScope(uint64_t seed);
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;
  /// Names the tensors of the finished module and attaches their start values.
  void finish(torch::nn::Module& module);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class Module>
torch::nn::Module& module_of(Module& made) {
  if constexpr (requires { made.ptr(); }) {
    return *made.ptr();
  } else {
    return *made;
  }
}

}  // namespace nn

struct DeferredOptions {
  uint64_t seed = 0;  ///< of all random start values, in place of torch::manual_seed
};

/// Builds the module that `fn` makes (a holder or a shared_ptr) without allocating it:
///
///   auto net = weft::deferred([&] { return Net(config); }, {.seed = 1});
///   weft::DataParallel dp(net, world.comm(), {.sharding = weft::Sharding::parameters});
///
/// What the constructors do to their tensors is recorded and done later, for what is needed alone: under DataParallel each rank
/// makes its own shards, so that no rank ever holds more than those and a Unit. uniform_ and normal_ (torch::nn::init's, randn,
/// rand and theirs) draw from a counter-based generator by (seed, parameter's name in the module that fn returns, element), so
/// that values do not depend on the ranks; they are other numbers than torch's for the same distribution. Everything else that
/// is recorded is torch's own operation: element by element on a part if it can be, else on the whole of that one tensor.
///
/// fn must not look at values (item(), torch::tensor of a std::vector, data_ptr()): ConfigError or c10::Error. It also sets the dtype:
/// to() on the finished module loses the record, which is an error later. Tensors that forward uses must be parameters or
/// registered buffers. Modules that are not wrapped: weft::materialise. Not for CUDA modules.
template <class Fn>
auto deferred(Fn&& fn, DeferredOptions options = {}) {
  nn::DeferredScope scope(options.seed);
  auto made = std::forward<Fn>(fn)();
  scope.finish(nn::module_of(made));
  return made;
}

/// Gives all parameters and buffers of a deferred module memory and values. DataParallel does it for what it needs. ConfigError
/// for a tensor on meta that was not made under weft::deferred.
void materialise(torch::nn::Module& module);
template <class Contained>
void materialise(const torch::nn::ModuleHolder<Contained>& holder) {
  materialise(static_cast<torch::nn::Module&>(*holder.ptr()));
}

}  // namespace weft
