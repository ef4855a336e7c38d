#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>
#include <sstream>

#include "weft/core/error.h"
#include "weft/core/philox.h"
#include "weft/nn/call_log.h"

namespace weft::nn {
namespace {

using c10::IValue;
using Storage = const c10::StorageImpl*;

enum class Draw { none, uniform, normal };

/// Operations that draw by element; others take a generator.
Draw draw_of(const RecordedCall& call) {
  const std::string& name = call.op.operator_name().name;
  if (name == "aten::uniform_" || name == "aten::rand" || name == "aten::rand_like") return Draw::uniform;
  if (name == "aten::normal_" || name == "aten::randn" || name == "aten::randn_like") return Draw::normal;
  return Draw::none;
}

bool draws_into(const at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf; }

/// Elements begin .. of a stream, into `out` [n] (contiguous). 16-bit values are rounded fp32 ones.
void draw(Draw kind, uint64_t seed, const std::string& stream, int64_t begin, double a, double b, const at::Tensor& out) {
  const auto fill = [&]<class T>(std::span<T> span) {
    const uint64_t id = philox::stream_of(stream);
    const auto first = static_cast<uint64_t>(begin);
    kind == Draw::uniform ? philox::fill_uniform(span, seed, id, first, a, b) : philox::fill_normal(span, seed, id, first, a, b);
  };
  const auto n = static_cast<size_t>(out.numel());
  if (out.scalar_type() == at::kDouble) return fill(std::span(out.mutable_data_ptr<double>(), n));
  const at::Tensor wide = out.scalar_type() == at::kFloat ? out : at::empty({out.numel()}, at::kFloat);
  fill(std::span(wide.mutable_data_ptr<float>(), n));
  if (!wide.is_same(out)) out.copy_(wide);
}

}  // namespace

/// Does recorded calls again on real tensors: on whole ones, or on elements begin .. begin + n - 1 of all alike.
class Replay {
 public:
  Replay(const CallLog& log, int64_t begin, std::optional<int64_t> n) : log_(log), begin_(begin), n_(n) {}

  void run(const RecordedCall& call) {
    const std::string& name = call.op.operator_name().name;
    const Draw kind = draw_of(call);
    const bool in_place = name.back() == '_';
    if (kind != Draw::none && draws_into(call.outputs.at(0).scalar_type())) {
      const at::Tensor target = real(call.outputs[0]);
      const double a = in_place ? call.arguments[1].toDouble() : 0.0, b = in_place ? call.arguments[2].toDouble() : 1.0;
      const at::Tensor drawn = target.is_contiguous() ? target.view({-1}) : at::empty({target.numel()}, target.options());
      draw(kind, log_.seed_, call.stream, begin_, a, b, drawn);
      if (!target.is_contiguous()) target.copy_(drawn.view_as(target));
    } else if (n_ && made_alike(call)) {
      fill_alike(call);
    } else {
      again(call);
    }
  }

  at::Tensor real(const at::Tensor& recorded) {
    auto& memory = memory_[recorded.storage().unsafeGetStorageImpl()];
    const auto options = at::TensorOptions().dtype(recorded.dtype());
    if (n_) {
      if (!memory.defined()) memory = at::empty({*n_}, options);
      return memory;
    }
    if (!memory.defined()) memory = at::empty({static_cast<int64_t>(recorded.storage().nbytes())}, at::kByte);
    at::Tensor tensor = at::empty({0}, options);
    return tensor.set_(memory.storage(), recorded.storage_offset(), recorded.sizes(), recorded.strides());
  }

  /// A tensor of one value throughout, made by a factory.
  static bool made_alike(const RecordedCall& call) {
    const std::string& name = call.op.operator_name().name;
    return name == "aten::empty" || name == "aten::zeros" || name == "aten::ones" || name == "aten::full";
  }

 private:
  void fill_alike(const RecordedCall& call) {
    const std::string& name = call.op.operator_name().name;
    const at::Tensor made = real(call.outputs[0]);
    if (name == "aten::zeros") made.zero_();
    if (name == "aten::ones") made.fill_(1);
    if (name == "aten::full") made.fill_(call.arguments[1].toScalar());
  }

  void again(const RecordedCall& call) {
    const auto& schema = call.op.schema();
    const auto takes_generator = [](const c10::Argument& a) { return a.name() == "generator"; };
    if (call.draws && std::none_of(schema.arguments().begin(), schema.arguments().end(), takes_generator)) {
      throw ConfigError(fmt::format("weft::deferred: {} of dtype {} draws from torch's default generator, which gives every rank other "
                                    "numbers. Use uniform_ or normal_ (torch::nn::init)",
                                    call.op.operator_name().name, c10::toString(call.outputs.at(0).scalar_type())));
    }
    torch::jit::Stack stack;
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      const c10::Argument& as = schema.arguments()[i];
      if (as.name() == "device") {
        stack.emplace_back(at::Device(at::kCPU));
      } else if (as.name() == "generator") {
        stack.emplace_back(at::make_generator<at::CPUGeneratorImpl>(log_.seed_ ^ philox::stream_of(call.stream)));
      } else {
        stack.push_back(map_tensors(call.arguments[i], [&](const at::Tensor& t) { return log_.is_deferred(t) ? real(t) : t; }));
      }
    }
    call.op.callBoxed(stack);
    size_t at = 0;
    for (const IValue& output : torch::jit::last(stack, schema.returns().size()).vec()) {
      map_tensors(output, [&](const at::Tensor& made) {
        keep(call.outputs.at(at++), made);
        return made;
      });
    }
  }

  /// What a call made, in place of what it made without memory.
  void keep(const at::Tensor& recorded, const at::Tensor& made) {
    const Storage storage = recorded.storage().unsafeGetStorageImpl();
    if (memory_.contains(storage)) return;
    if (n_) {
      memory_[storage] = made;
    } else {
      const at::Tensor same = made.strides() == recorded.strides() ? made : made.contiguous();
      if (same.strides() != recorded.strides()) {
        throw InternalError(fmt::format("weft::deferred: a tensor has strides ({}) without memory and others with it",
                                        fmt::join(recorded.strides(), ", ")));
      }
      memory_[storage] = at::empty({0}, at::kByte).set_(same.storage());
    }
  }

  const CallLog& log_;
  int64_t begin_;
  std::optional<int64_t> n_;
  std::map<Storage, at::Tensor> memory_;  // [n] elements, or all bytes
};

class RecordedValues final : public StartValues {
 public:
  RecordedValues(std::shared_ptr<const CallLog> log, at::Tensor tensor)
      : log_(std::move(log)), tensor_(std::move(tensor)), calls_(log_->calls_for(tensor_)) {
    local_ = is_whole(tensor_) && std::all_of(calls_.begin(), calls_.end(), [&](size_t c) { return is_local(log_->calls_[c]); });
  }

  void write(int64_t begin, at::Tensor part) const override {
    const at::NoGradGuard no_grad;
    Replay replay(*log_, local_ ? begin : 0, local_ ? std::optional(part.numel()) : std::nullopt);
    for (const size_t c : calls_) replay.run(log_->calls_[c]);
    const at::Tensor values = replay.real(tensor_);
    part.copy_((local_ ? values : values.reshape({-1}).narrow(0, begin, part.numel())).view_as(part));
  }

  std::string describe() const override {
    std::ostringstream text;
    text << "seed " << log_->seed_;
    for (const size_t c : calls_) {
      const RecordedCall& call = log_->calls_[c];
      text << ' ' << call.op.operator_name().name << '(';
      for (const IValue& argument : call.arguments) {
        const bool plain = argument.isScalar() || argument.isIntList() || argument.isString();
        text << (plain ? fmt::format("{}", fmt::streamed(argument)) : "") << ',';
      }
      text << ')' << call.stream;
    }
    return text.str();
  }

 private:
  bool same_elements(const at::Tensor& t) const { return is_whole(t) && t.numel() == tensor_.numel(); }

  /// Element i of what it writes depends on elements i alone.
  bool is_local(const RecordedCall& call) const {
    if (!std::all_of(call.outputs.begin(), call.outputs.end(), [&](const at::Tensor& t) { return same_elements(t); })) return false;
    if (draw_of(call) != Draw::none) return draws_into(call.outputs[0].scalar_type());
    if (Replay::made_alike(call)) return true;
    const std::string& name = call.op.operator_name().name;
    const bool listed = name == "aten::zero_" || name == "aten::fill_" || name == "aten::copy_" || name == "aten::to" || name == "aten::_to_copy" || name == "aten::clone";
    if (call.draws || !(listed || call.op.hasTag(at::Tag::pointwise))) return false;
    bool local = true;
    for (const IValue& argument : call.arguments) {
      map_tensors(argument, [&](const at::Tensor& t) {
        local = local && (log_->is_deferred(t) ? same_elements(t) : t.numel() == 1);
        return t;
      });
    }
    return local;
  }

  std::shared_ptr<const CallLog> log_;
  at::Tensor tensor_;
  std::set<size_t> calls_;
  bool local_ = false;
};

std::shared_ptr<const StartValues> CallLog::values_of(const at::Tensor& tensor) {
  return is_deferred(tensor) ? std::make_shared<RecordedValues>(shared_from_this(), alias_of(tensor)) : nullptr;
}

}  // namespace weft::nn
