// Recompute: a forward keeps its inputs instead of what autograd saves, and runs again when backward asks for that.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace weft {

/// What a Unit's backward computes again instead of keeping it. The first two and the last are Megatron-LM's recompute
/// granularities (Korthikanti et al. 2022, "Reducing Activation Recomputation"), `half` is torch's selective checkpointing
/// as torchtitan uses it.
enum class Recompute {
  none,            ///< nothing
  attention,       ///< the attention core where its scores are kept; nothing with a kernel that does not keep them (Megatron's "selective")
  keep_matmuls,    ///< everything but attention and matrix products
  half,            ///< everything but attention and every second matrix product, the first included
  keep_attention,  ///< everything but attention
  full             ///< everything: what stays is the Unit's inputs
};
/// "none", "attention", "keep_matmuls", ...
const char* recompute_name(Recompute mode);
/// ConfigError with the names for any other.
Recompute recompute_of_name(const std::string& name);

/// True while a forward runs again for its backward: for code that counts calls, or changes what is no buffer of a module.
bool is_recomputing();

namespace autograd {

/// How a Unit keeps its activations, and its name for messages.
struct ActivationRule {
  std::string unit;
  Recompute recompute = Recompute::none;
  bool on_host = false;  ///< what autograd saves lies in host memory until backward; with Recompute::none
};

class Segment;
class HostCopies;
struct Frame;

/// Whether a forward under `rule` records anything: with gradients enabled, and not inside another that is recomputed, which
/// covers it.
bool records(const ActivationRule& rule);

/// ConfigError: the Unit's forward takes an argument that cannot be kept for a second forward.
[[noreturn]] void refuse_uncopyable(const ActivationRule& rule);

/// Around the first forward of a Unit; only where records() is true. While it lives, what autograd saves on this thread is given up, and `again` brings it back in backward: once in a backward, as far as the last
/// tensor that is needed, with gradients enabled, the random numbers, autocast and buffers of the first time, and buffers as
/// they were afterwards. What `again` saves must be equal in number, shapes and dtypes to what the first forward saved.
///
/// Errors, all ConfigErrors that name the Unit: in returned() if an input was changed in place; in backward if an input or a
/// parameter has been changed in place since, if the second forward saves other tensors, or if a gradient is asked for while
/// the first forward runs. Gradients may themselves be differentiated; each backward runs the forward again.
class Recorded {
 public:
  /// inputs: tensors that `again` uses and keeps alive; they and the parameters and buffers of `module` (may be null) are kept
  /// as they are.
  Recorded(const ActivationRule& rule, torch::nn::Module* module, std::vector<at::Tensor> inputs, std::function<void()> again);
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
  /// The forward has returned.
  void returned();

 private:
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<HostCopies> host_copies_;
  std::unique_ptr<Frame> frame_;
};

/// A part of a forward that modes treat apart from the rest. attention_scores: an attention whose scores autograd saves.
enum class Part { attention, attention_scores, matmul };

/// False if no mode that treats parts apart is in force on this thread.
bool parts_matter();
at::Tensor run_part(Part kind, std::vector<at::Tensor> inputs, std::function<at::Tensor()> fn);

/// fn(), which computes one tensor from `inputs`. Layers put their dear parts into it. Where the mode keeps this kind, its
/// result and what it saves beside its inputs are kept, and it does not run again; inputs themselves are computed again. Under
/// Recompute::attention an attention with scores is a recomputed stretch of its own. fn owns what it uses (captures by value).
template <class F>
at::Tensor part(Part kind, std::initializer_list<at::Tensor> inputs, F fn) {
  return parts_matter() ? run_part(kind, inputs, std::move(fn)) : fn();
}

}  // namespace autograd
}  // namespace weft
