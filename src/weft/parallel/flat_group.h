// FlatGroup: parameters that lie in one flat buffer, cut into one equal shard per rank of a replica. Gathered and reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/autograd/kept_tensor.h"
#include "weft/nn/start_values.h"
#include "weft/parallel/data_axes.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/flat_view.h"
#include "weft/parallel/gradient_pool.h"

namespace weft::parallel {

/// One parameter of a group.
struct FlatSlot {
  std::string name;
  at::Tensor parameter;   ///< the module's, full shape; a view of the flat parameter buffer
  at::Tensor shard;       ///< this rank's elements of it [0 .. numel], a leaf for the optimizer; undefined if frozen
  at::Tensor shard_grad;  ///< their reduced gradient, the same shape
  int64_t offset = 0;     ///< of the parameter in the flat buffer, in elements of the buffer
  bool ready = false;     ///< its gradient of this round has landed
  bool used = false;      ///< this rank had a gradient in this round
  bool kept = false;      ///< shard_grad holds sums that were not reduced over the replicas
};

/// Where the parameters are between uses.
enum class Residence {
  whole,    ///< every rank keeps all of them; out of date from the reduction until refresh() (ZeRO-1, ZeRO-2)
  released  ///< every rank keeps its shard; the rest exists from gather() to release() (ZeRO-3)
};

/// Who waits for whom:
///   reshard        after forward: this rank keeps its part of a copy that a few ranks hold between them (Plan::near), from which
///                  the next start_gather_near() gathers; it is gone with that or the next release.
///   start_gather   reads the peers' shards in place; finish_gather() returns when this rank's copy is there. Peers may still
///                  read this rank's shard: settle() returns when they do not, and only then may an optimizer write.
///   adopt          brings a gradient into the flat gradient buffer; that comes from the pool with the group's first gradient
///                  (kept for good when `keep_full_gradients`).
///   launch         reduce-scatters the buffer within the replica; take_over() waits for that, adds what the shard held before, gives
///                  the buffer back and starts the all-reduce of the shard with the other replicas; collect() waits for both.
class FlatGroup {
 public:
  struct Plan {
    std::string label;                 ///< for messages: "unit 'layers.0'"
    at::ScalarType gradient_dtype = at::kFloat;
    bool trainable = true;
    Residence residence = Residence::whole;
    bool keep_full_gradients = false;  ///< a full gradient buffer of its own for good (ZeRO-1)
    int64_t granule = 1;               ///< cuts fall on multiples of so many elements of a parameter
    bool on_host = false;              ///< released: the shard and its gradients lie in host memory
    int64_t near = 0;                  ///< ranks that hold a copy between forward and backward; 0: no such copy
    std::optional<at::ScalarType> reduce_dtype;  ///< in which gradients travel; nullopt: as they are kept
  };

  /// Moves the parameters (one dtype, one device) into the buffer with the values of rank 0 of all. Of those without memory
  /// (nn/start_values.h) each rank makes its own shard; what is released then never exists whole. Collective.
  FlatGroup(Plan plan, const std::vector<NamedTensor>& parameters, const DataAxes& axes);

  std::vector<FlatSlot>& slots() { return slots_; }
  const std::vector<FlatSlot>& slots() const { return slots_; }
  const Plan& plan() const { return plan_; }
  int64_t gradient_bytes() const;
  at::Device device() const { return full_.device(); }
  /// Of the parameters, by identity (autograd/kept_tensor.h).
  const void* memory() const { return autograd::memory_of(full_); }

  void start_gather();
  /// From the copy that reshard() left if there is one; else start_gather().
  void start_gather_near();
  void finish_gather();
  bool holds_data() const { return holds_data_; }
  void release();
  void reshard();
  /// What reshard() left is out of date.
  void drop_near() { near_part_.reset(); }
  /// The shards have changed or are about to: what is whole must be gathered before it is read.
  void set_stale();
  /// Ends set_stale(): nothing has changed after all.
  void set_current();
  /// Takes over what was written into the gathered parameters on this rank: its own part. After settle().
  void keep_written();
  void settle() { gather_.released(); }

  void open_round();
  bool complete() const { return missing_ == 0; }
  bool launched() const { return launched_; }
  void mark_ready(FlatSlot& slot);
  /// True if it copied: the gradient was not in the buffer yet.
  bool adopt(FlatSlot& slot, GradientPool& pool);
  /// How this round reduces.
  struct Reduction {
    ReduceOp op = ReduceOp::sum;
    bool across = true;  ///< over the replicas, too; if not, the shard keeps the sums of this replica for a later round
  };
  /// Slots without gradient contribute zeros. The parameters' own grad() is undefined afterwards.
  void launch(GradientPool& pool, Reduction how);
  /// Zeros throughout; the parameters' own grad() stays as it is.
  void launch_failed(GradientPool& pool, Reduction how);
  /// Between launch and take_over it holds more memory than a buffer of the pool.
  bool holds_memory() const { return in_flight_ && !taken_over_ && (wire_.defined() || earlier_.defined()); }
  /// take_over() will not wait. Groups are taken over in their order, so that all-reduces start in the same order on all ranks.
  bool reduction_done() { return reduction_.test(); }
  void take_over();
  /// False, and nothing has happened, if a peer needs this rank first.
  bool take_over_unless_needed();
  /// Waits for what take_over() started.
  void collect();
  /// Presents the reduced gradients as shard.grad(); used [slots]: above 0 where any rank had a gradient. Undefined elsewhere, and
  /// everywhere while they are not reduced over the replicas.
  void present(const float* used);
  /// The shard holds sums that were not reduced over the replicas.
  bool holds_partial_sums() const;
  /// Forgets gradients that were not reduced.
  void drop_local();
  void drop_reduced();

  /// Where the slot's parameter is cut: rank r of the replica holds its elements cuts[r] .. cuts[r + 1] - 1.
  std::vector<int64_t> cuts(const FlatSlot& slot) const;

  /// The slot's parameter still lies in the flat buffer.
  bool at_home(const FlatSlot& slot) const;

 private:
  void make_shard_views();
  void start_from_first(const Comm& all);
  void start_from_rules(const std::vector<std::shared_ptr<const nn::StartValues>>& rules);
  /// This rank's elements of the slot: a stretch of the flat buffer, and a tensor of their dtype without memory.
  struct OwnPart {
    int64_t from = 0;
    at::Tensor like;
  };
  OwnPart own_part_of(const FlatSlot& slot) const;
  void start_reduction(Reduction how);
  void merge(double earlier_counts);
  void keep_earlier();
  void begin_gradients(GradientPool& pool);
  void give_back_buffer();
  /// What is reduced comes to the shard through wire_: in another dtype, or on another device.
  bool travels_apart() const {
    return plan_.reduce_dtype.value_or(plan_.gradient_dtype) != plan_.gradient_dtype || shard_gradients_.device() != device();
  }
  at::Tensor own_part(const at::Tensor& flat) const { return flat.narrow(0, comm_.rank() * shard_numel_, shard_numel_); }
  at::Tensor gradient_view(const FlatSlot& slot) const { return part_of(full_gradients_, slot.offset, slot.parameter); }

  Plan plan_;
  Comm comm_;  // gathers; its ranks are the replica's
  Comm reductions_, replicas_, near_;
  int64_t numel_ = 0, shard_numel_ = 0;
  at::Tensor memory_;           // whole: [numel], shared; the two below alias it
  at::Tensor full_;             // [numel], what the parameters are views of
  at::Tensor shard_;            // [shard_numel]
  at::Tensor near_part_;        // [numel / near] from reshard() to the gather in backward
  at::Tensor near_sent_;        // the same while that gather goes on
  at::Tensor full_gradients_;   // [numel] while there are unreduced gradients
  at::Tensor shard_gradients_;  // [shard_numel]; a part of full_gradients_ if those are kept
  at::Tensor wire_input_;       // [numel] gradients as they travel, while they are reduce-scattered
  at::Tensor wire_;             // [shard_numel] reduced gradients as they travel, until they are in the shard
  at::Tensor earlier_;          // copy of shard_gradients_ while the buffer is reused on top of them
  GradientPool::Buffer* buffer_ = nullptr;
  std::vector<FlatSlot> slots_;
  Work gather_, near_gather_, reduction_, across_;
  std::string message_;
  bool holds_data_ = true;
  bool adds_ = false;           // this round adds to reduced gradients that are still in the shard
  bool has_gradients_ = false;  // there are gradients that were not reduced, or not collected
  bool launched_ = false;       // in this round
  bool in_flight_ = false;      // launched and not collected
  bool taken_over_ = false;
  bool merged_ = false;         // what was reduce-scattered in this round is in the shard
  bool partial_ = false;        // it holds what this replica alone has reduced
  Reduction how_;               // of this round
  int64_t missing_ = 0;
};

}  // namespace weft::parallel
