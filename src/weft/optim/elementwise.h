// What AdamW, SGD, Lion and 8-bit AdamW have in common: each element (or block of elements) of a parameter is updated on its own, so
// an update can run on any stretch of a shard, with the state that belongs to it wherever that lies.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/optim/offload_options.h"

namespace weft::optim {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

/// State of one parameter: the number of updates so far, and tensors by name. Archives have the form of torch::optim's own states.
struct NamedState : torch::optim::OptimizerCloneableParamState<NamedState> {
  int64_t step = 0;
  std::map<std::string, at::Tensor> tensors;
  std::function<std::map<std::string, at::Tensor>()> elsewhere;  ///< reads tensors that are in a file instead

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// One tensor of a parameter's state.
struct StateSpec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  int64_t per = 1;  ///< elements of the parameter that share one number

  int64_t numel(int64_t elements) const { return (elements + per - 1) / per; }
};

/// Name of the fp32 copy of a parameter in a 16-bit type. The parameter is always the rounding of its master: an update below half
/// a unit of bf16 is not lost.
inline constexpr char kMaster[] = "master";

/// ConfigError for a loaded state that is of another optimizer, or of one with other options.
void require_as_kept(const at::Tensor& state, const StateSpec& spec, int64_t elements);

/// A stretch of a parameter, of n elements, and what belongs to it. Tensors are flat and contiguous, on the CPU (or all meta).
struct Stretch {
  at::Tensor weight;               ///< [n] fp32 or fp64: the parameter's elements, or their masters
  at::Tensor grad;                 ///< [n] weight's dtype, bf16 or fp16
  at::Tensor copy;                 ///< [n] bf16 or fp16: gets the rounded weights; undefined if there is no master
  std::vector<at::Tensor> states;  ///< one per own_states(), in that order, [StateSpec::numel(n)]
  int64_t step = 1;                ///< number of this update, from 1
  int64_t begin = 0;               ///< of the stretch in the tensor that the optimizer holds: a multiple of granule()
  const void* parameter = nullptr; ///< that tensor's TensorImpl, to look up what is known of it
};

/// A whole parameter as kernels take it; makes what `state` lacks of `specs` (and of the master).
struct Kept {
  Kept(const at::Tensor& parameter, NamedState& state, const std::vector<StateSpec>& specs, bool master);
  /// With a master for 16-bit parameters.
  Kept(const at::Tensor& parameter, NamedState& state, const std::vector<StateSpec>& specs);

  at::Tensor weight, grad, copy;   ///< as Stretch has them
  std::vector<at::Tensor> states;  ///< one per spec
};

/// Whether a master is kept for parameters of this type.
bool is_16_bit(at::ScalarType dtype);
/// Type of masters and moments of a parameter of `dtype`: fp64 for fp64, else fp32.
at::ScalarType wide_dtype(at::ScalarType dtype);

/// The loss of an optional closure, evaluated with gradients on (as torch's optimizers do).
at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure);
/// ConfigError for what Weft's kernels do not update: sparse, complex, not contiguous, not on the CPU.
void require_dense(const at::Tensor& parameter, const at::Tensor& grad);
/// Sharded parameters have to be gathered after the update, before anybody reads them.
void notify_updated(const std::vector<OptimizerParamGroup>& groups);
/// Groups keep the options that they came with. (torch::optim does so for its own kinds of options only.)
void keep_options(std::vector<OptimizerParamGroup>& held, const std::vector<OptimizerParamGroup>& given);

/// ConfigError unless low <= value < below.
void check_range(const char* option, double value, double low, double below = std::numeric_limits<double>::infinity());

class OffloadedStates;

/// Parameters without gradient are skipped: no decay, no moment update.
class ElementwiseOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;
  at::Tensor step(LossClosure closure = nullptr) final;

  /// Keeps state and masters where `options` says; numbers stay what they were, to the bit. Call it last of all settings, before the
  /// first step and before load(). ConfigError when it comes too late, and as StateFile.
  void offload(const OffloadOptions& options, const memory::FileCalls& calls = memory::FileCalls::system());
  /// Empty unless state is in a file.
  std::optional<OffloadUse> offload_use() const;

  /// What is kept of `parameter`, the master first if there is one. Fresh states are zeros, a fresh master is the parameter.
  std::vector<StateSpec> state_specs(const at::Tensor& parameter, const OptimizerOptions& options) const;
  /// The same without the master: what Stretch::states has.
  virtual std::vector<StateSpec> own_states(const at::Tensor& parameter, const OptimizerOptions& options) const = 0;
  /// Where stretches of `parameter` may begin: at multiples of so many elements.
  virtual int64_t granule(const at::Tensor& /*parameter*/) const { return 1; }
  /// Updates one stretch in place. Depends on the arguments alone and gives the same bits however a parameter is cut; may run on
  /// several threads at once.
  virtual void update(const Stretch& stretch, const OptimizerOptions& options) const = 0;

 protected:
  /// To be called at the end of load().
  void loaded();
  virtual bool keeps_master(const at::Tensor& parameter) const { return is_16_bit(parameter.scalar_type()); }

 private:
  void update_parameter(const at::Tensor& parameter, const OptimizerOptions& options);

  std::optional<OffloadOptions::To> offloaded_to_;
  std::shared_ptr<OffloadedStates> in_file_;
};

}  // namespace weft::optim
