// A stretch of forward whose saved tensors are given up and computed again. Behind recompute.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "weft/autograd/kept_tensor.h"
#include "weft/autograd/random_state.h"
#include "weft/autograd/recompute.h"
#include "weft/autograd/saved_tensors.h"

namespace weft::autograd {

/// What autograd saves in the first forward is numbered in order; backward asks for it by these numbers. The second forward
/// delivers it in the same order.
class Segment final : public std::enable_shared_from_this<Segment> {
 public:
  Segment(ActivationRule rule, torch::nn::Module* module, std::vector<at::Tensor> inputs, std::function<void()> again);
  ~Segment();

  const ActivationRule& rule() const { return rule_; }
  SavedTensors& recorder() { return *recorder_; }
  void check_inputs_unchanged() const;
  void end_recording();

  /// Inputs, parameters and buffers, and views of them.
  bool holds(const at::Tensor& tensor) const { return held_.count(memory_of(tensor)) > 0; }
  size_t note(const at::Tensor& tensor);
  /// Of saved tensor `index`, for the backward that runs.
  at::Tensor value(size_t index);
  /// Nobody will ask for it any more.
  void forget(size_t index);
  /// Throws if what was kept has been changed.
  at::Tensor checked(const KeptTensor& kept) const;

  /// A part that is kept: runs it in the first forward, returns its result in the second.
  at::Tensor kept_part(const std::vector<at::Tensor>& inputs, const std::function<at::Tensor()>& fn);
  /// Whether this one, of those of its kind, is kept.
  bool keeps(Part kind);

  void collect(const at::Tensor& tensor);

 private:
  class Recorder;
  class Collector;
  class PartRecorder;
  struct Saved {  // without memory
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool wanted = true;
  };
  struct PartView {  // saved tensor `index` is a view of an input
    size_t index, input;
    std::vector<int64_t> strides;
    int64_t offset;
  };
  struct KeptPart {
    KeptTensor result;
    bool requires_grad;
    std::vector<PartView> views;
  };

  void find_held();
  void run_again();
  void check_unchanged() const;
  void deliver(size_t index, const at::Tensor& value);
  [[noreturn]] void fail(const std::string& what) const;

  ActivationRule rule_;
  torch::nn::Module* module_;
  std::weak_ptr<torch::nn::Module> owner_;  // not the module itself: it may hold the Unit's output, and that this
  bool owned_ = false;
  std::vector<at::Tensor> inputs_;
  std::function<void()> again_;
  std::vector<KeptTensor> constants_;  // inputs and parameters, as they must be in the second forward
  std::unordered_set<const void*> held_;
  std::unique_ptr<SavedTensors> recorder_;
  std::optional<RandomState> random_;  // if the forward drew numbers
  struct AutocastState {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<AutocastState> autocast_;
  bool recording_ = true;

  std::recursive_mutex mutex_;  // nodes of several devices run on several threads; a forward may drop graphs of an earlier call
  std::vector<Saved> saved_;
  std::vector<KeptPart> parts_;
  std::vector<at::Tensor> values_;  // of the last second forward
  int task_ = -1;                   // the backward that it ran in
  size_t needed_ = 0;               // a second forward ends with this many
  size_t next_ = 0, next_part_ = 0, matmuls_ = 0;
};

/// Where this thread is: in a forward under a rule; in the first or the second forward of a segment, if there is one.
struct Frame {
  Frame(const ActivationRule& rule, Segment* segment, SavedTensors* saved);
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;
  static const Frame* innermost();

  ActivationRule rule;
  Segment* segment;
  bool again = false;  ///< in a second forward
  Frame* outer;
  SavedTensorScope scope;
};

}  // namespace weft::autograd
