#include "weft/autograd/recompute.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "weft/autograd/host_copies.h"
#include "weft/autograd/segment.h"
#include "weft/core/error.h"

namespace weft {
namespace {

struct Name {
  Recompute mode;
  const char* text;
};
constexpr std::array<Name, 6> kNames{{{Recompute::none, "none"},
                                      {Recompute::attention, "attention"},
                                      {Recompute::keep_matmuls, "keep_matmuls"},
                                      {Recompute::half, "half"},
                                      {Recompute::keep_attention, "keep_attention"},
                                      {Recompute::full, "full"}}};

thread_local autograd::Frame* innermost = nullptr;

}  // namespace

const char* recompute_name(Recompute mode) {
  return std::find_if(kNames.begin(), kNames.end(), [&](const Name& name) { return name.mode == mode; })->text;
}

Recompute recompute_of_name(const std::string& name) {
  std::vector<std::string> known;
  for (const Name& candidate : kNames) {
    if (name == candidate.text) return candidate.mode;
    known.emplace_back(candidate.text);
  }
  throw ConfigError(fmt::format("recompute \"{}\" is none of {}", name, fmt::join(known, ", ")));
}

bool is_recomputing() { return innermost != nullptr && innermost->again; }

namespace autograd {

Frame::Frame(const ActivationRule& rule, Segment* segment, SavedTensors* saved)
    : rule(rule), segment(segment), again(is_recomputing()), outer(std::exchange(weft::innermost, this)), scope(saved) {}
Frame::~Frame() { weft::innermost = outer; }
const Frame* Frame::innermost() { return weft::innermost; }

bool records(const ActivationRule& rule) {
  if (rule.recompute == Recompute::none && !rule.on_host) return false;
  if (!at::GradMode::is_enabled()) return false;
  for (const Frame* frame = Frame::innermost(); frame != nullptr; frame = frame->outer) {
    if (frame->segment != nullptr) return false;
  }
  return true;
}

void refuse_uncopyable(const ActivationRule& rule) {
  throw ConfigError(fmt::format("unit '{}' cannot be recomputed: its forward takes an argument that has no copy to keep for the second "
                                "forward. Pass it by shared_ptr, or set Recompute::none for this Unit", rule.unit));
}

Recorded::Recorded(const ActivationRule& rule, torch::nn::Module* module, std::vector<at::Tensor> inputs, std::function<void()> again) {
  install_saved_tensor_hooks();
  if (rule.recompute == Recompute::none) {
    host_copies_ = std::make_unique<HostCopies>(module);
    frame_ = std::make_unique<Frame>(rule, nullptr, host_copies_.get());
    return;
  }
  if (rule.recompute == Recompute::attention) {  // its core is the segment
    frame_ = std::make_unique<Frame>(rule, nullptr, nullptr);
    return;
  }
  segment_ = std::make_shared<Segment>(rule, module, std::move(inputs), std::move(again));
  frame_ = std::make_unique<Frame>(rule, segment_.get(), &segment_->recorder());
}

Recorded::~Recorded() {
  frame_.reset();
  if (segment_) segment_->end_recording();
}

void Recorded::returned() {
  if (segment_) segment_->check_inputs_unchanged();
}

bool parts_matter() {
  const Frame* frame = Frame::innermost();
  if (frame == nullptr) return false;
  const Recompute mode = frame->rule.recompute;
  if (mode == Recompute::attention) return frame->segment == nullptr && at::GradMode::is_enabled();
  return mode == Recompute::keep_matmuls || mode == Recompute::half || mode == Recompute::keep_attention;
}

at::Tensor run_part(Part kind, std::vector<at::Tensor> inputs, std::function<at::Tensor()> fn) {
  const Frame& frame = *Frame::innermost();
  if (frame.segment != nullptr) return frame.segment->keeps(kind) ? frame.segment->kept_part(inputs, fn) : fn();
  if (kind != Part::attention_scores) return fn();
  const ActivationRule rule{.unit = frame.rule.unit, .recompute = Recompute::full};
  Recorded core(rule, nullptr, std::move(inputs), [fn] { fn(); });
  const at::Tensor result = fn();
  core.returned();
  return result;
}

}  // namespace autograd
}  // namespace weft
