// What was done to tensors without memory, and how it is done again for the part that is needed. Internal to weft::deferred.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "weft/nn/start_values.h"

namespace weft::nn {

/// One operation. Tensors in it are known by storage and geometry, since set_data() may change a tensor afterwards.
struct RecordedCall {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  ///< as given; of deferred tensors, aliases
  std::vector<at::Tensor> outputs;     ///< aliases
  bool draws = false;                  ///< takes random numbers
  std::string stream;                  ///< from which stream: set by name_tensor()
};

class CallLog : public std::enable_shared_from_this<CallLog> {
 public:
  explicit CallLog(uint64_t seed) : seed_(seed) {}

  /// Runs `op` on shapes alone and records it if it made or changed a deferred tensor. The dispatcher's fallback.
  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  /// The tensor will be known by this name; random numbers that its values need and no earlier tensor's do are drawn from
  /// streams of that name.
  void name_tensor(const std::string& name, const at::Tensor& tensor);
  std::shared_ptr<const StartValues> values_of(const at::Tensor& tensor);

 private:
  friend class Replay;
  friend class RecordedValues;
  using Storage = const c10::StorageImpl*;

  bool is_deferred(const at::Tensor& tensor) const;
  void record(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, const std::vector<c10::IValue>& outputs);
  void need(Storage storage, size_t before, std::set<size_t>& calls) const;
  std::set<size_t> calls_for(const at::Tensor& tensor) const;

  uint64_t seed_;
  std::vector<RecordedCall> calls_;
  std::map<Storage, std::vector<size_t>> writers_;  ///< calls that made or changed a storage
};

/// Shares its memory (or lack of it) and nothing else.
at::Tensor alias_of(const at::Tensor& tensor);
/// Calls fn(tensor) for the tensors in an argument; it returns what takes their place.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& fn);
/// All elements of its storage, in order.
bool is_whole(const at::Tensor& tensor);
/// The call writes all of its first argument without reading it.
bool overwrites(const RecordedCall& call);

}  // namespace weft::nn
