// What DataParallel forwards to: the replicated engine (Sharding::none) or the sharded one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "weft/nn/unit_hooks.h"
#include "weft/parallel/data_parallel.h"

namespace weft::parallel {

/// A Unit of the wrapped module, and the parameters that are its own.
struct UnitSpec {
  std::string name;
  nn::UnitBase* unit = nullptr;
};

class Engine {
 public:
  virtual ~Engine() = default;
  /// After construction: attaches hooks, which hold weak references.
  virtual void watch() = 0;
  virtual void sync(bool on) = 0;
  virtual void finish() = 0;
  virtual void settle() = 0;
  virtual void join_without_batch() = 0;
  virtual double grad_norm(double norm_type) = 0;
  virtual double clip_grad_norm(double max_norm, double norm_type) = 0;
  virtual void zero_grad() = 0;
  virtual const std::vector<NamedTensor>& parameters() const = 0;
  virtual const std::vector<NamedTensor>& shards() const = 0;
  virtual const Comm& comm() const = 0;
  virtual const DataParallelOptions& options() const = 0;
  virtual std::map<std::string, TrafficCount> traffic() const { return comm().traffic(); }
  virtual void sync_replicas(bool /*on*/) {}
  virtual void refresh() {}
  virtual void continue_accumulation() {}
  /// Gathers and keeps the Units with parameters whose names match; what it returns goes to end_full().
  virtual std::vector<size_t> hold_full(const std::string& /*names*/) { return {}; }
  virtual void end_full(const std::vector<size_t>& /*units*/) {}
  /// Calls `visit` once for every parameter, while its values are whole.
  virtual void visit_full(const std::function<void(const at::Tensor&)>& visit) = 0;
  virtual void write_shards(const std::function<void()>& write) = 0;
};

}  // namespace weft::parallel
