#include "weft/autograd/segment.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/nn/module.h>

#include <utility>

#include "weft/autograd/backward_end.h"
#include "weft/core/error.h"

namespace weft::autograd {
namespace {

/// Ends a second forward. Not a std::exception: no handler of the module's is meant.
struct Enough {};

/// Buffers as they were, whatever a second forward does to them. Written below their version counters: for autograd nothing has
/// happened to them.
class Buffers {
 public:
  explicit Buffers(const torch::nn::Module* module) {
    const at::NoGradGuard no_grad;
    if (module == nullptr) return;
    for (const at::Tensor& buffer : module->buffers()) {
      if (buffer.defined()) kept_.emplace_back(buffer, buffer.detach().clone());
    }
  }
  ~Buffers() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value] : kept_) buffer.variable_data().copy_(value);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

class Random {
 public:
  explicit Random(const std::optional<RandomState>& state) {
    if (!state) return;
    outer_ = RandomState::now();
    state->restore();
  }
  ~Random() {
    if (outer_) outer_->restore();
  }
  Random(const Random&) = delete;
  Random& operator=(const Random&) = delete;

 private:
  std::optional<RandomState> outer_;
};

/// Without the cache of cast weights: what a second forward casts must not outlive it.
class AutocastCache {
 public:
  AutocastCache() : enabled_(at::autocast::is_autocast_cache_enabled()) { at::autocast::set_autocast_cache_enabled(false); }
  ~AutocastCache() { at::autocast::set_autocast_cache_enabled(enabled_); }
  AutocastCache(const AutocastCache&) = delete;
  AutocastCache& operator=(const AutocastCache&) = delete;

 private:
  bool enabled_;
};

class Autocast {
 public:
  Autocast(at::DeviceType device, bool enabled, at::ScalarType dtype)
      : device_(device), enabled_(at::autocast::is_autocast_enabled(device)), dtype_(at::autocast::get_autocast_dtype(device)) {
    set(enabled, dtype);
  }
  ~Autocast() { set(enabled_, dtype_); }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  void set(bool enabled, at::ScalarType dtype) const {
    at::autocast::set_autocast_enabled(device_, enabled);
    at::autocast::set_autocast_dtype(device_, dtype);
  }
  at::DeviceType device_;
  bool enabled_;
  at::ScalarType dtype_;
};

std::string shape_text(at::IntArrayRef sizes, at::ScalarType dtype) {
  return fmt::format("[{}] {}", fmt::join(sizes.begin(), sizes.end(), ", "), c10::toString(dtype));
}

}  // namespace

/// Where one saved tensor is: kept as it is, or a number in the segment.
class SavedByNumber : public torch::autograd::SavedVariableHooks {
 public:
  explicit SavedByNumber(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}
  ~SavedByNumber() override {
    if (number_) segment_->forget(*number_);
  }
  void call_pack_hook(const at::Tensor& tensor) override { place(tensor); }
  at::Tensor call_unpack_hook() override { return number_ ? segment_->value(*number_) : segment_->checked(kept_); }

 protected:
  virtual void place(const at::Tensor& tensor) { segment_->holds(tensor) ? keep(tensor) : number(segment_->note(tensor)); }
  void keep(const at::Tensor& tensor) { kept_ = KeptTensor::of(tensor); }
  void number(size_t index) { number_ = index; }
  Segment& segment() { return *segment_; }

 private:
  std::shared_ptr<Segment> segment_;
  KeptTensor kept_;
  std::optional<size_t> number_;
};

class Segment::Recorder final : public SavedTensors {
 public:
  explicit Recorder(Segment& segment) : segment_(segment) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> hook() override { return std::make_unique<SavedByNumber>(segment_.shared_from_this()); }

 private:
  Segment& segment_;
};

/// In a part that is kept: everything but what is a view of the part's inputs.
class Segment::PartRecorder final : public SavedTensors {
 public:
  PartRecorder(Segment& segment, const std::vector<at::Tensor>& inputs, std::vector<PartView>& views)
      : segment_(segment), inputs_(inputs), views_(views) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> hook() override { return std::make_unique<SavedInPart>(segment_.shared_from_this(), *this); }

 private:
  class SavedInPart final : public SavedByNumber {
   public:
    SavedInPart(std::shared_ptr<Segment> segment, PartRecorder& part) : SavedByNumber(std::move(segment)), part_(&part) {}

   private:
    void place(const at::Tensor& tensor) override {
      PartRecorder& part = *std::exchange(part_, nullptr);  // it ends with the part
      if (segment().holds(tensor)) return keep(tensor);
      for (size_t i = 0; i < part.inputs_.size(); ++i) {
        if (memory_of(part.inputs_[i]) != memory_of(tensor)) continue;
        part.views_.push_back({.index = segment().note(tensor), .input = i, .strides = tensor.strides().vec(),
                               .offset = tensor.storage_offset() - part.inputs_[i].storage_offset()});
        return number(part.views_.back().index);
      }
      keep(tensor);
    }
    PartRecorder* part_;
  };

  Segment& segment_;
  const std::vector<at::Tensor>& inputs_;
  std::vector<PartView>& views_;
};

/// In a second forward. What its own graph saves goes to the segment; nobody runs that graph.
class Segment::Collector final : public SavedTensors {
 public:
  explicit Collector(Segment& segment) : segment_(segment) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> hook() override { return std::make_unique<Given>(segment_); }

 private:
  class Given final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Given(Segment& segment) : segment_(&segment) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      if (!segment_->holds(tensor)) segment_->collect(tensor);
    }
    at::Tensor call_unpack_hook() override { throw InternalError("a backward through a second forward"); }

   private:
    Segment* segment_;
  };
  Segment& segment_;
};

Segment::Segment(ActivationRule rule, torch::nn::Module* module, std::vector<at::Tensor> inputs, std::function<void()> again)
    : rule_(std::move(rule)), module_(module), inputs_(std::move(inputs)), again_(std::move(again)), recorder_(std::make_unique<Recorder>(*this)) {
  for (const at::Tensor& input : inputs_) constants_.push_back(KeptTensor::of(input));
  if (module_ != nullptr) {
    owner_ = module_->weak_from_this();
    owned_ = !owner_.expired();
    for (const at::Tensor& parameter : module_->parameters()) constants_.push_back({parameter, KeptTensor::version_of(parameter)});
  }
  find_held();
  for (const at::DeviceType device : {at::kCPU, at::kCUDA})
    autocast_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  random_ = RandomState::now();
}

Segment::~Segment() = default;

void Segment::end_recording() {
  recording_ = false;
  if (random_ == RandomState::now()) random_.reset();
}

void Segment::find_held() {
  held_.clear();
  const auto hold = [this](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (const void* memory = tensor.defined() ? memory_of(tensor) : nullptr) held_.insert(memory);
    }
  };
  hold(inputs_);
  if (module_ == nullptr) return;
  hold(module_->parameters());
  hold(module_->buffers());
}

void Segment::fail(const std::string& what) const {
  throw ConfigError(fmt::format("unit '{}' is recomputed in backward (Recompute::{}), and {}", rule_.unit, recompute_name(rule_.recompute), what));
}

void Segment::check_inputs_unchanged() const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!constants_[i].unchanged()) {
      fail(fmt::format("its forward changes its input {} in place. Let it work on a copy, or set Recompute::none for this Unit",
                       shape_text(inputs_[i].sizes(), inputs_[i].scalar_type())));
    }
  }
}

void Segment::check_unchanged() const {
  if (owned_ && owner_.expired()) fail("its module is gone. Keep the module until backward has run");
  for (const KeptTensor& constant : constants_) checked(constant);
}

at::Tensor Segment::checked(const KeptTensor& kept) const {
  if (!kept.unchanged()) {
    fail(fmt::format("a tensor {} that its backward needs, an input, a parameter or a kept result, has been modified by an in-place "
                     "operation since its forward. Run backward first, or modify a copy",
                     shape_text(kept.alias.sizes(), kept.alias.scalar_type())));
  }
  return kept.alias;
}

size_t Segment::note(const at::Tensor& tensor) {
  saved_.push_back({.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()});
  return saved_.size() - 1;
}

void Segment::forget(size_t index) {
  const std::lock_guard lock(mutex_);
  saved_[index].wanted = false;
  if (index < values_.size()) values_[index].reset();
}

at::Tensor Segment::value(size_t index) {
  const std::lock_guard lock(mutex_);
  if (recording_) fail("a gradient is taken inside its forward. Take it outside, or set Recompute::none for this Unit");
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(task_, task) != task || index >= values_.size() || !values_[index].defined()) {
    run_again();
    if (task >= 0) {  // what this backward does not ask for goes with it
      at_backward_end([weak = weak_from_this()] {
        const auto self = weak.lock();
        if (!self) return;
        const std::lock_guard guard(self->mutex_);
        self->values_.clear();
      });
    }
  }
  return std::exchange(values_[index], at::Tensor());
}

void Segment::run_again() {
  check_unchanged();
  find_held();
  values_.assign(saved_.size(), at::Tensor());
  next_ = next_part_ = matmuls_ = needed_ = 0;
  for (size_t i = 0; i < saved_.size(); ++i) {
    if (saved_[i].wanted) needed_ = i + 1;
  }
  const at::AutoGradMode with_gradients(true);
  const AutocastCache no_cache;
  std::vector<std::unique_ptr<Autocast>> autocast;
  for (const AutocastState& state : autocast_) autocast.push_back(std::make_unique<Autocast>(state.device, state.enabled, state.dtype));
  const Random random(random_);
  const Buffers buffers(module_);
  Collector collector(*this);
  Frame frame(rule_, this, &collector);
  frame.again = true;
  try {
    again_();
  } catch (const Enough&) {
    return;
  } catch (...) {
    values_.clear();
    throw;
  }
  values_.clear();
  fail(fmt::format("its second forward saved {} tensors where the first one saved at least {}. The forward must do the same each "
                   "time: no choice by time, by a counter (see weft::is_recomputing) or by a generator of its own, and no change of "
                   "train() or eval() before backward",
                   next_, needed_));
}

void Segment::deliver(size_t index, const at::Tensor& value) {
  const Saved& first = saved_[index];
  if (value.sizes() != at::IntArrayRef(first.sizes) || value.scalar_type() != first.dtype) {
    fail(fmt::format("saved tensor {} is {} in its second forward and was {} in the first. The forward must do the same each time",
                     index, shape_text(value.sizes(), value.scalar_type()), shape_text(first.sizes, first.dtype)));
  }
  if (first.wanted) values_[index] = value;
  next_ = index + 1;
  if (next_ >= needed_) throw Enough{};
}

void Segment::collect(const at::Tensor& tensor) {
  if (next_ >= needed_) throw Enough{};
  deliver(next_, tensor.detach());
}

bool Segment::keeps(Part kind) {
  switch (rule_.recompute) {
    case Recompute::keep_matmuls: return true;
    case Recompute::half: return kind != Part::matmul || matmuls_++ % 2 == 0;
    case Recompute::keep_attention: return kind != Part::matmul;
    default: return false;
  }
}

at::Tensor Segment::kept_part(const std::vector<at::Tensor>& inputs, const std::function<at::Tensor()>& fn) {
  const ActivationRule nothing_inside{.unit = rule_.unit};
  if (recording_) {
    parts_.emplace_back();
    const size_t at = parts_.size() - 1;
    PartRecorder recorder(*this, inputs, parts_[at].views);
    const Frame frame(nothing_inside, nullptr, &recorder);
    const at::Tensor result = fn();
    parts_[at].result = KeptTensor::of(result);
    parts_[at].requires_grad = result.requires_grad();
    return result;
  }
  if (next_part_ >= parts_.size()) fail("its second forward has more kept parts than the first");
  const KeptPart& part = parts_[next_part_++];
  for (const PartView& view : part.views) {
    if (view.index != next_) fail("its second forward saved other tensors before a kept part than the first");
    const at::Tensor& input = inputs[view.input];
    deliver(view.index, input.detach().as_strided(saved_[view.index].sizes, view.strides, input.storage_offset() + view.offset));
  }
  return checked(part.result).detach().requires_grad_(part.requires_grad);
}

}  // namespace weft::autograd
