#include "weft/nn/call_log.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "weft/core/error.h"

namespace weft::nn {
namespace {

using c10::IValue;

bool has_tensors(const std::vector<IValue>& arguments) {
  bool found = false;
  for (const IValue& argument : arguments) {
    map_tensors(argument, [&](const at::Tensor& t) {
      found = true;
      return t;
    });
  }
  return found;
}

/// Index of the device argument, or the number of arguments.
size_t device_argument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto found = std::find_if(arguments.begin(), arguments.end(), [](const c10::Argument& a) { return a.name() == "device"; });
  return static_cast<size_t>(found - arguments.begin());
}

bool is_random(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) { return tensor.variable_data(); }

IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& fn) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(fn(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? fn(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t && t->defined() ? std::optional(fn(*t)) : t);
    return list;
  }
  return value;
}

bool is_whole(const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.storage_offset() == 0 &&
         tensor.numel() * static_cast<int64_t>(tensor.element_size()) == static_cast<int64_t>(tensor.storage().nbytes());
}

bool overwrites(const RecordedCall& call) {
  static constexpr std::array<std::string_view, 4> kNames{"aten::uniform_", "aten::normal_", "aten::zero_", "aten::fill_"};
  const bool listed = std::find(kNames.begin(), kNames.end(), call.op.operator_name().name) != kNames.end();
  return (listed || call.op.operator_name().name == "aten::copy_") && is_whole(call.arguments[0].toTensor());
}

bool CallLog::is_deferred(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.is_meta() && tensor.has_storage() && writers_.contains(tensor.storage().unsafeGetStorageImpl());
}

void CallLog::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  std::vector<IValue> arguments = torch::jit::last(stack, schema.arguments().size()).vec();
  bool touches = false;
  for (const IValue& argument : arguments) {
    map_tensors(argument, [&](const at::Tensor& t) {
      touches = touches || is_deferred(t);
      return t;
    });
  }
  const size_t device = device_argument(schema);
  const bool has_device = device < arguments.size();
  const bool on_host = has_device && (arguments[device].isNone() || arguments[device].toDevice().is_cpu());
  if (!touches && !(on_host && !has_tensors(arguments))) return op.callBoxed(stack);
  // On shapes: every tensor and every factory is on the meta device.
  const auto to_meta = [&](const at::Tensor& t) { return is_deferred(t) || t.is_meta() ? t : t.to(at::kMeta); };
  torch::jit::drop(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool place = i == device && (!touches || !arguments[i].isNone());
    stack.push_back(place ? IValue(at::Device(at::kMeta)) : map_tensors(arguments[i], to_meta));
  }
  for (IValue& argument : arguments) argument = map_tensors(argument, alias_of);  // before the call changes a geometry
  try {
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError& error) {
    throw ConfigError(fmt::format("weft::deferred: {} cannot be done without values ({}). Do it after the module is wrapped, or build "
                                  "the module without weft::deferred", op.operator_name().name, error.what_without_backtrace()));
  }
  record(op, std::move(arguments), torch::jit::last(stack, schema.returns().size()).vec());
}

void CallLog::record(const c10::OperatorHandle& op, std::vector<IValue> arguments, const std::vector<IValue>& outputs) {
  RecordedCall call{.op = op, .arguments = std::move(arguments), .outputs = {}, .draws = is_random(op)};
  std::set<Storage> written;
  const auto& schema = op.schema();
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    map_tensors(call.arguments[i], [&](const at::Tensor& t) {
      written.insert(t.storage().unsafeGetStorageImpl());
      return t;
    });
  }
  for (const IValue& output : outputs) {
    map_tensors(output, [&](const at::Tensor& t) {
      const Storage storage = t.storage().unsafeGetStorageImpl();
      if (!writers_.contains(storage)) written.insert(storage);
      call.outputs.push_back(alias_of(t));
      return t;
    });
  }
  if (written.empty()) return;  // a view
  for (const Storage storage : written) writers_[storage].push_back(calls_.size());
  calls_.push_back(std::move(call));
}

void CallLog::need(Storage storage, size_t before, std::set<size_t>& calls) const {
  const auto writers = writers_.find(storage);
  if (writers == writers_.end()) return;
  for (auto it = writers->second.rbegin(); it != writers->second.rend(); ++it) {
    if (*it >= before) continue;
    const RecordedCall& call = calls_[*it];
    const bool afresh = overwrites(call) && call.arguments[0].toTensor().storage().unsafeGetStorageImpl() == storage;
    if (calls.insert(*it).second) {
      for (size_t a = afresh ? 1 : 0; a < call.arguments.size(); ++a) {
        map_tensors(call.arguments[a], [&](const at::Tensor& t) {
          need(t.storage().unsafeGetStorageImpl(), *it, calls);
          return t;
        });
      }
    }
    if (afresh) return;
  }
}

std::set<size_t> CallLog::calls_for(const at::Tensor& tensor) const {
  std::set<size_t> calls;
  need(tensor.storage().unsafeGetStorageImpl(), calls_.size(), calls);
  return calls;
}

void CallLog::name_tensor(const std::string& name, const at::Tensor& tensor) {
  if (!is_deferred(tensor)) return;
  int drawn = 0;
  for (const size_t c : calls_for(tensor)) {
    RecordedCall& call = calls_[c];
    if (!call.draws || !call.stream.empty()) continue;
    call.stream = drawn == 0 ? name : fmt::format("{}#{}", name, drawn);
    ++drawn;
  }
}

}  // namespace weft::nn
