// Unit<M>: a stretch of the model that is gathered together. It is the hook that libtorch's C++ modules do not have.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/nn/unit_hooks.h"

namespace weft {
namespace nn {

/// The tensors inside a module's result: tensors, optionals, pairs, tuples, vectors, arrays, maps, in any nesting. Other
/// types are looked at as having none; a struct of tensors is listed by an overload found through its own namespace.
inline void collect_tensors(const at::Tensor& tensor, std::vector<at::Tensor>& out) {
  if (tensor.defined()) out.push_back(tensor);
}
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& out) {
  if constexpr (requires { value.has_value(); *value; }) {
    if (value.has_value()) collect_tensors(*value, out);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (const auto& item : value) collect_tensors(item.second, out);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... part) { (collect_tensors(part, out), ...); }, value);
  } else if constexpr (requires { typename T::value_type; value.begin(); }) {
    if constexpr (!std::is_same_v<typename T::value_type, char>) {
      for (const auto& item : value) collect_tensors(item, out);
    }
  }
}

/// The Impl of a holder, or the Impl itself.
template <class M>
struct ImplOf {
  using type = M;
};
template <class M>
  requires requires { typename M::ContainedType; }
struct ImplOf<M> {
  using type = typename M::ContainedType;
};

template <class F>
struct SignatureOf;
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...)> {
  using type = R(A...);
};
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...) const> {
  using type = R(A...);
};

/// Signature of M::forward; void where the caller must say it because it is overloaded or a template.
template <class M, class Signature>
struct ForwardOf {
  using type = Signature;
};
template <class M>
struct ForwardOf<M, void> {
  using type = typename SignatureOf<decltype(&M::forward)>::type;
};

template <class M, class Signature>
class UnitImpl;

template <class M, class R, class... A>
class UnitImpl<M, R(A...)> : public M, public UnitBase {
 public:
  using M::M;

  R forward(A... args) {
    return around([&]() -> R {
      if (!autograd::records(activations())) return M::forward(std::forward<A>(args)...);
      return recorded_forward(std::forward<A>(args)...);
    });
  }

  /// Runs `fn`, which may use this Unit's parameters, as if it were its forward: gathered before, released after, and
  /// gathered again when a gradient comes to a tensor of its result. For losses that need a head's weight itself. Nothing of it
  /// is recomputed.
  template <class F>
  auto around(F&& fn) -> std::invoke_result_t<F> {
    const std::shared_ptr<UnitHooks> hooks = this->hooks();
    if (!hooks) return fn();
    UnitCall call(*hooks);
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      fn();
      call.returned({});
    } else {
      auto result = fn();
      std::vector<at::Tensor> tensors;
      collect_tensors(result, tensors);
      call.returned(tensors);
      return result;
    }
  }

  /// A Unit of its own, attached to no engine. M must be a torch::nn::Cloneable, as for clone() without Unit.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    if constexpr (std::is_base_of_v<torch::nn::Cloneable<M>, M>) {
      auto copy = std::make_shared<UnitImpl>(*this);
      // Through M: what reset() made anew is in the clone, and assignment brings its tensors and children over.
      static_cast<M&>(*copy) = static_cast<const M&>(*std::dynamic_pointer_cast<M>(M::clone(device)));
      return copy;
    } else {
      return M::clone(device);
    }
  }

 private:
  /// A forward whose activations are not all kept (autograd/recompute.h). Arguments are copied, tensors in them are not.
  R recorded_forward(A... args) {
    if constexpr ((std::is_copy_constructible_v<std::decay_t<A>> && ...)) {
      std::vector<at::Tensor> inputs;
      (collect_tensors(args, inputs), ...);
      const auto copies = std::make_shared<const std::tuple<std::decay_t<A>...>>(args...);
      autograd::Recorded call(activations(), this, std::move(inputs), [this, copies] {
        if (const auto hooks = this->hooks()) hooks->needed_in_backward();
        std::tuple<std::decay_t<A>...> again = *copies;
        std::apply([this](auto&... arg) { static_cast<void>(this->M::forward(static_cast<A&&>(arg)...)); }, again);
      });
      if constexpr (std::is_void_v<R>) {
        M::forward(std::forward<A>(args)...);
        call.returned();
      } else {
        R result = M::forward(std::forward<A>(args)...);
        call.returned();
        return result;
      }
    } else {
      autograd::refuse_uncopyable(activations());
    }
  }
};

}  // namespace nn

/// A module holder whose module is the user's own, sharded as one piece by DataParallel. M: a holder (TORCH_MODULE) or an
/// Impl. forward has M's signature (default arguments are lost), parameter names do not change, and it goes wherever M goes:
/// register_module, Sequential, AnyModule. For an overloaded or templated forward say which: Unit<M, Ret(Args...)>.
template <class M, class Signature = void>
class Unit : public torch::nn::ModuleHolder<
                 nn::UnitImpl<typename nn::ImplOf<M>::type,
                              typename nn::ForwardOf<typename nn::ImplOf<M>::type, Signature>::type>> {
 public:
  using Impl = nn::UnitImpl<typename nn::ImplOf<M>::type,
                            typename nn::ForwardOf<typename nn::ImplOf<M>::type, Signature>::type>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
};

}  // namespace weft
