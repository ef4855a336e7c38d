// DataParallel: data parallelism with a dial, from DDP to fully sharded.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/layout/place.h"
#include "weft/parallel/reduce_hook.h"

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}
namespace torch::optim {
class Optimizer;
}
namespace weft::parallel {
class Engine;
}
namespace torch::jit {
struct Module;
}

namespace weft {

class Mesh;

/// A tensor and its dotted name ("layers.0.attn.wq.weight"). Names are the identity of a parameter on all ranks.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// What the reduced gradient is. `mean_over_ranks` is PyTorch's convention: the mean of the ranks' gradients. `sum` is
/// their sum, for losses that are already divided by a global count.
enum class GradScale { mean_over_ranks, sum };

/// What happens to buffers (BatchNorm statistics and the like) at the end of each synchronised backward: rank 0's values
/// on every rank (PyTorch's broadcast_buffers), the mean of floating-point buffers, or nothing.
enum class BufferPolicy { broadcast, average, local };

/// The dial: what each rank keeps a part of, besides the optimizer's work.
enum class Sharding {
  none,       ///< nothing (DDP): gradients are all-reduced, every rank updates everything
  optimizer,  ///< optimizer state (ZeRO-1): gradients are reduce-scattered, each rank updates its shard
  gradients,  ///< and gradients (ZeRO-2): full gradients exist group by group, until they are reduced
  parameters  ///< and parameters (ZeRO-3, FSDP): a Unit's exist while it runs. Those outside of any Unit: as `gradients`
};

/// zero = 0 .. 3, as in files and on the command line.
Sharding sharding_of_zero(int64_t zero);

/// What is left of a Unit's parameters between its forward and its backward (Sharding::parameters).
class Reshard {
 public:
  /// true: this rank's shard; backward gathers the rest again. false: all of them, until their gradients have landed.
  Reshard(bool after_forward) : after_forward_(after_forward) {}  // NOLINT(google-explicit-constructor)
  /// Neighbouring ranks that hold one copy between them, from which backward gathers, on one machine say (FSDP2's integer
  /// reshard_after_forward). Divides the ranks that share the parameters out, and is neither 1 nor all of them.
  template <std::integral Integer>
    requires(!std::same_as<Integer, bool>)
  Reshard(Integer ranks) : group_(static_cast<int64_t>(ranks)) {}  // NOLINT(google-explicit-constructor)

  bool after_forward() const { return after_forward_; }
  const std::optional<int64_t>& group() const { return group_; }

 private:
  bool after_forward_ = true;
  std::optional<int64_t> group_;
};

/// Settings of some Units that differ from those of the others; what is not set is as in DataParallelOptions.
struct UnitOptions {
  std::string units;  ///< names of Units, as named_modules() has them: "head|layers.*" (core/pattern.h)
  /// Sharding::optimizer or gradients: their parameters stay whole on each rank. Sharding::parameters: sharded, also where the
  /// others are not.
  std::optional<Sharding> sharding;
  std::optional<Reshard> reshard_after_forward;
  std::optional<at::ScalarType> reduce_dtype;
};

/// Where parameters may be cut over ranks.
struct Granule {
  std::string parameters;  ///< names: "*", "layers.*.weight|head.weight" (core/pattern.h)
  int64_t elements = 1;    ///< cuts fall on multiples of so many elements, counted row-major from the parameter's beginning
};

struct DataParallelOptions {
  Sharding sharding = Sharding::none;
  /// Ranks that share one copy of what is sharded; 0 = all. Fewer: replicas x shards (HSDP, PyTorch's HYBRID_SHARD). Neighbouring
  /// ranks form a replica; gradients are reduce-scattered in it and all-reduced between replicas. Divides the number of ranks.
  int64_t dp_shard = 0;
  /// Sharding::parameters: release a Unit's parameters after its forward and gather them again in backward (true), keep them
  /// until its gradients have landed (false: less traffic, more memory), or keep a copy between so many ranks.
  Reshard reshard_after_forward = true;
  /// Sharding::parameters: Units gathered ahead of the one that runs.
  int64_t prefetch = 1;
  /// Sharding::parameters: the shards of Units, and their gradients, lie in host memory; each gather copies the shard to the device, and
  /// optimizers step on the host (FSDP's CPUOffload, DeepSpeed's offload_param = cpu). Where modules are on the CPU it is the same
  /// place, and nothing is copied. Same numbers.
  bool offload_parameters = false;
  GradScale grad_scale = GradScale::mean_over_ranks;
  BufferPolicy buffers = BufferPolicy::broadcast;
  /// Dtype in which gradients are kept and reduced; nullopt: the parameter's own. Sums are exact to fp32 in any case.
  std::optional<at::ScalarType> gradient_dtype;
  /// Dtype in which gradients travel between the ranks (kBFloat16 halves the bytes of fp32); nullopt: as they are kept.
  /// Sums form in fp32. See reduce_as() for the error bound.
  std::optional<at::ScalarType> reduce_dtype;
  /// Another way to reduce a bucket (compression of your own) under Sharding::none. Not together with reduce_dtype.
  ReduceHook reduce_hook;
  /// Exceptions for some Units; of a Unit's the first that names it counts. Not under Sharding::none. ConfigError for one that
  /// names no Unit.
  std::vector<UnitOptions> units;
  /// For optimizers that treat blocks of elements together (8-bit moments have blocks of 256): their numbers do not depend on the
  /// number of ranks where no block is cut. Of a parameter the first that names it counts; others may be cut anywhere. At most 65536
  /// elements; costs padding to multiples of that.
  std::vector<Granule> granules;
  /// Ranks that hold other stages of the same model (mesh["pp"], parallel/pipeline.h): norms and clipping are those of all stages. All
  /// of them compute norms together.
  Comm stages;
  /// Names of parameters that another stage holds, too, and counts in norms (tied weights): "tok.weight" (core/pattern.h).
  std::string counted_elsewhere;
  layout::BucketLimits bucket;
  /// false: reduce everything at the end of backward (to tell whether overlap matters; same numbers).
  bool overlap = true;
};

/// Keeps the replicas of a module equal: parameters and buffers are broadcast from rank 0 at construction, gradients are
/// reduced bucket by bucket while backward runs, and are complete when the outermost backward() returns.
///
/// Parameters keep their identity (names, TensorImpl); their storage moves into flat buffers, and after a synchronised
/// backward each `grad()` is a view of a flat gradient buffer. An unchanged torch::optim optimizer therefore works.
/// A parameter that no rank used has an undefined grad() afterwards (optimizers skip it); one used by some ranks gets
/// zeros from the others. Several backward calls in one step add up, as they do on one rank.
///
/// Errors: ConfigError at construction when ranks built different models (first difference named), a parameter is
/// wrapped twice, or a parameter is sparse; when storage was replaced after wrapping (`to()`), at the next backward.
/// CommError when a peer fails. Every rank calls backward the same number of times with sync on; a rank that has no
/// batch, or whose forward threw, calls join_without_batch() instead.
///
/// If backward throws on some ranks, its gradients are dropped on all: the others' backward() of that step throws a
/// CommError that names the ranks. It is the one CommError after which the group goes on: a program that catches on every
/// rank continues with the next step. The ranks that threw tell the others at their next backward(), finish(),
/// join_without_batch(), grad_norm() or global_mean(); a handler that does something else first should call finish().
class DataParallel {
 public:
  DataParallel(std::shared_ptr<torch::nn::Module> module, Comm comm, DataParallelOptions options = {});
  /// A TORCH_MODULE: DataParallel dp(net, world.comm()).
  template <class Contained>
  DataParallel(const torch::nn::ModuleHolder<Contained>& holder, Comm comm, DataParallelOptions options = {})
      : DataParallel(std::shared_ptr<torch::nn::Module>(holder.ptr()), std::move(comm), std::move(options)) {}
  /// Over mesh["dp"], with the mesh's dp_shard as DataParallelOptions::dp_shard. A mesh names dp_replicate before dp_shard.
  DataParallel(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh, DataParallelOptions options = {});
  template <class Contained>
  DataParallel(const torch::nn::ModuleHolder<Contained>& holder, const Mesh& mesh, DataParallelOptions options = {})
      : DataParallel(std::shared_ptr<torch::nn::Module>(holder.ptr()), mesh, std::move(options)) {}
  /// A TorchScript module, as torch::jit::load returns it.
  DataParallel(const torch::jit::Module& module, Comm comm, DataParallelOptions options = {});
  /// Any holder of tensors. `buffers` take part in construction's broadcast and in BufferPolicy.
  DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm,
               DataParallelOptions options = {});
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;
  DataParallel& operator=(DataParallel&&) noexcept;

  /// false: following backward calls only accumulate locally. true (default): the next backward reduces the total.
  void sync(bool on);
  /// With replicas (dp_shard): false: the next backward calls reduce within each replica only, and shards keep its sums. true
  /// (default): the next one reduces them over the replicas, too (FSDP2's set_requires_all_reduce). So an accumulation that reduces in
  /// each micro-step crosses the replicas once. Until then shards have no grad(), and grad_norm() and refresh() throw
  /// ConfigError; zero_grad() of this class drops the sums. Collective where it changes something; no-op with one replica.
  void sync_replicas(bool on);

  /// Completes the reduction; no-op when nothing is pending. backward() calls it; calling it again is harmless.
  void finish();
  /// Takes part in this step's reduction with zero gradients (this rank ran out of data). Under Sharding::parameters it stands
  /// in for one forward and one backward of the others in which each Unit is used at most once.
  void join_without_batch();

  /// Global norm of the reduced gradients, each logical parameter counted once, then scaling by max_norm / (norm + 1e-6)
  /// if that is below 1. `norm_type` > 0 or infinity. Returns the norm before clipping, the same on every rank.
  double clip_grad_norm(double max_norm, double norm_type = 2.0);
  /// The norm alone.
  double grad_norm(double norm_type = 2.0);

  /// Drops all gradients (as zero_grad(set_to_none) does).
  void zero_grad();

  /// The trainable parameters, in parameter-table order.
  const std::vector<NamedTensor>& parameters() const;
  /// Frozen ones, too, and tied ones under each of their names.
  const std::vector<NamedTensor>& all_parameters() const { return all_; }

  /// What this rank's optimizer updates: for each of parameters(), in the same order, this rank's elements of it (a flat leaf
  /// tensor, maybe empty, with its reduced gradient as grad()), or the parameter itself under Sharding::none. Any optimizer
  /// that treats elements alike works on them; gradients of the module's own parameters are undefined after backward. Which part
  /// of the parameter a shard is, and whose the others are: shard_info() (parallel/shard_owner.h).
  const std::vector<NamedTensor>& shards() const;
  /// optimizer.step() and refresh(). ConfigError, by name, for optimizers that need whole tensors (LBFGS). Any optimizer
  /// over shards().
  void step(torch::optim::Optimizer& optimizer);
  /// Brings updated shards to all ranks. Collective. weft::optim's optimizers call it in step(); with others it is the
  /// caller's, and until then touching parameters that are kept whole throws. No-op when nothing is out of date.
  void refresh();
  /// Says that weights were not updated since the last synchronised backward: the next one adds to its gradients.
  void continue_accumulation();

  /// While it lives, parameters hold their full values on every rank, whatever the dial says; what is written into them becomes
  /// part of the shards. Backward calls belong outside.
  class [[nodiscard]] Full {
   public:
    Full(std::shared_ptr<parallel::Engine> engine, const std::string& names);
    ~Full();
    Full(Full&&) noexcept = default;

   private:
    std::shared_ptr<parallel::Engine> engine_;
    std::vector<size_t> units_;  // held by this scope
  };
  /// Of all parameters. Forward calls then do not communicate, so ranks may do different numbers of them. Collective; the end
  /// of the scope is not. Scopes may be nested.
  Full gather_full();
  /// Of the Units that hold the parameters whose names match ("head.weight|layers.3.*", core/pattern.h): to read or write them
  /// without gathering all. Other Units are gathered and released as ever. ConfigError, on every rank, when no parameter
  /// matches or ranks name different ones. Collective; the end of the scope is not.
  Full unsharded(const std::string& names);

  /// Calls `visit` once for every name in all_parameters(), while the values are whole: Units are gathered one after the other, so a
  /// rank holds one of them at most. In the same order on all ranks, so `visit` may
  /// communicate. Between steps; collective.
  void visit_full(const std::function<void(const NamedTensor&)>& visit);

  /// A copy of all parameters and buffers by name, in memory of its own: for an evaluation or another thread while training goes
  /// on (load_values() puts it into a module). Floating-point tensors in `dtype` if that is given. Tied names share a copy. Units
  /// are gathered one after the other, so a rank holds the copy and one Unit at most. Between steps; collective.
  std::vector<NamedTensor> snapshot(std::optional<at::ScalarType> dtype = std::nullopt);
  /// Runs `write`, which may change the values of shards() outside of an optimizer's step (on each rank its own; equal values under
  /// Sharding::none), and brings them to all ranks, also when it throws. Between steps; collective. ConfigError while a scope of
  /// gather_full() or unsharded() lives.
  void write_shards(const std::function<void()>& write);

  const Comm& comm() const;
  /// Calls and bytes of all groups that this engine communicates in, by operation.
  std::map<std::string, TrafficCount> traffic() const;
  const DataParallelOptions& options() const;

 private:
  friend at::Tensor global_mean(const at::Tensor&, int64_t, const DataParallel&);
  void settle() const;

  std::vector<NamedTensor> all_, buffers_;  // all parameters, frozen and tied ones included
  std::shared_ptr<parallel::Engine> engine_;
};

/// Copies `values` into the module's parameters and buffers of the same names, in the module's dtypes; one built under
/// weft::deferred gets memory. ConfigError with every finding, and nothing copied, when names or shapes differ.
void load_values(torch::nn::Module& module, const std::vector<NamedTensor>& values);
template <class Contained>
void load_values(const torch::nn::ModuleHolder<Contained>& holder, const std::vector<NamedTensor>& values) {
  load_values(static_cast<torch::nn::Module&>(*holder.ptr()), values);
}

/// loss = sum over all ranks of loss_sum / sum over all ranks of valid_count, in the gradient: returns this rank's share,
/// scaled for `dp`'s GradScale so that the reduced gradient is exactly that of the global mean. Collective. If no rank
/// has a valid element the result is loss_sum * 0.
at::Tensor global_mean(const at::Tensor& loss_sum, int64_t valid_count, const DataParallel& dp);

/// The same with a count that was agreed before, for instance over all micro-batches of a step; no communication.
at::Tensor scale_loss(const at::Tensor& loss_sum, int64_t global_valid_count, const DataParallel& dp);

/// Sum of `count` over the ranks.
int64_t global_count(int64_t count, const Comm& comm);

}  // namespace weft
