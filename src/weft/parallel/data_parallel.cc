#include "weft/parallel/data_parallel.h"

#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <unordered_map>

#include "weft/comm/mesh.h"
#include "weft/core/error.h"
#include "weft/core/pattern.h"
#include "weft/nn/start_values.h"
#include "weft/parallel/replicated_engine.h"
#include "weft/parallel/sharded_engine.h"

namespace weft {
namespace {

using parallel::Engine;
using parallel::UnitSpec;

std::vector<NamedTensor> named(const torch::OrderedDict<std::string, at::Tensor>& dict) {
  std::vector<NamedTensor> list;
  for (const auto& item : dict) list.push_back({item.key(), item.value()});
  return list;
}

const torch::nn::Module& checked(const std::shared_ptr<torch::nn::Module>& module) {
  if (!module) throw ConfigError("DataParallel was given no module (a null pointer or an empty holder)");
  return *module;
}

std::vector<UnitSpec> units_of(const torch::nn::Module& module) {
  std::vector<UnitSpec> units;
  for (const auto& item : module.named_modules()) {
    auto* unit = dynamic_cast<nn::UnitBase*>(item.value().get());
    if (unit != nullptr && !unit->dissolved()) units.push_back({item.key(), unit});
  }
  return units;
}

/// The mesh's shape as options.
DataParallelOptions on_mesh(const Mesh& mesh, DataParallelOptions options) {
  bool shard_seen = false;
  for (const Axis& axis : mesh.axes()) {
    shard_seen = shard_seen || (axis.name == "dp_shard" && axis.size > 1);
    if (shard_seen && axis.name == "dp_replicate" && axis.size > 1) {
      throw ConfigError("the mesh " + mesh.describe() + "names dp_replicate after dp_shard. Ranks of a replica are neighbours: name "
                        "dp_replicate first");
    }
  }
  const bool split = mesh.size("dp_shard") * mesh.size("dp_replicate") == mesh.size("dp");
  const int64_t dp_shard = split ? mesh.size("dp_shard") : mesh.size("dp");
  if (options.dp_shard != 0 && options.dp_shard != dp_shard) {
    throw ConfigError("DataParallelOptions::dp_shard is " + std::to_string(options.dp_shard) + ", but " + std::to_string(dp_shard) +
                      " on the mesh. Leave it out");
  }
  // Without sharding there are replicas alone.
  options.dp_shard = options.sharding == Sharding::none ? 0 : dp_shard;
  return options;
}

/// A rule that names no Unit is a slip of the keyboard.
void check_unit_rules(const DataParallelOptions& options, const std::vector<UnitSpec>& units) {
  for (const UnitOptions& rule : options.units) {
    if (std::any_of(units.begin(), units.end(), [&](const UnitSpec& unit) { return matches(rule.units, unit.name); })) continue;
    std::string known;
    for (const UnitSpec& unit : units) known += (known.empty() ? "" : ", ") + unit.name;
    throw ConfigError("DataParallelOptions::units has settings for '" + rule.units + "', and no Unit has such a name. The Units: " +
                      (known.empty() ? "none" : known));
  }
}

std::shared_ptr<Engine> make_engine(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                                    const std::vector<UnitSpec>& units, Comm comm, DataParallelOptions options) {
  check_unit_rules(options, units);
  // One rank has nothing to share out: the module stays as it is.
  const bool replicated = options.sharding == Sharding::none || comm.size() == 1;
  for (const NamedTensor& b : buffers) nn::materialise(b.tensor);
  for (const NamedTensor& p : parameters) {
    if (replicated) nn::materialise(p.tensor);
  }
  auto engine = replicated ? parallel::make_replicated_engine(std::move(parameters), std::move(buffers), std::move(comm), std::move(options))
                           : parallel::make_sharded_engine(std::move(parameters), std::move(buffers), units, std::move(comm),
                                                           std::move(options));
  engine->watch();
  return engine;
}

}  // namespace

Sharding sharding_of_zero(int64_t zero) {
  if (zero < 0 || zero > 3) {
    throw ConfigError("zero is " + std::to_string(zero) + "; it must be 0 (DDP), 1 (shard the optimizer), 2 (and gradients) or 3 "
                      "(and parameters)");
  }
  return static_cast<Sharding>(zero);
}

DataParallel::DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, Comm comm,
                           DataParallelOptions options)
    : all_(parameters),
      buffers_(buffers),
      engine_(make_engine(std::move(parameters), std::move(buffers), {}, std::move(comm), std::move(options))) {}

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module, Comm comm, DataParallelOptions options)
    : all_(named(checked(module).named_parameters())),
      buffers_(named(module->named_buffers())),
      engine_(make_engine(all_, buffers_, units_of(*module), std::move(comm), std::move(options))) {}

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh, DataParallelOptions options)
    : DataParallel(std::move(module), mesh["dp"], on_mesh(mesh, std::move(options))) {}

DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&&) noexcept = default;
DataParallel& DataParallel::operator=(DataParallel&&) noexcept = default;

void DataParallel::sync(bool on) { engine_->sync(on); }
void DataParallel::sync_replicas(bool on) { engine_->sync_replicas(on); }
void DataParallel::finish() { engine_->finish(); }
void DataParallel::settle() const { engine_->settle(); }
void DataParallel::join_without_batch() { engine_->join_without_batch(); }
double DataParallel::clip_grad_norm(double max_norm, double norm_type) { return engine_->clip_grad_norm(max_norm, norm_type); }
double DataParallel::grad_norm(double norm_type) { return engine_->grad_norm(norm_type); }
void DataParallel::zero_grad() { engine_->zero_grad(); }
const std::vector<NamedTensor>& DataParallel::parameters() const { return engine_->parameters(); }
const std::vector<NamedTensor>& DataParallel::shards() const { return engine_->shards(); }
const Comm& DataParallel::comm() const { return engine_->comm(); }
const DataParallelOptions& DataParallel::options() const { return engine_->options(); }
std::map<std::string, TrafficCount> DataParallel::traffic() const { return engine_->traffic(); }
void DataParallel::refresh() { engine_->refresh(); }
void DataParallel::continue_accumulation() { engine_->continue_accumulation(); }

void DataParallel::step(torch::optim::Optimizer& optimizer) {
  if (options().sharding != Sharding::none && dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw ConfigError("LBFGS needs whole tensors (it takes inner products over all parameters), and under Sharding::optimizer and "
                      "above each rank holds parts. Use Sharding::none, or an optimizer that treats elements alike (AdamW, SGD)");
  }
  engine_->finish();
  optimizer.step();
  engine_->refresh();
}

DataParallel::Full::Full(std::shared_ptr<Engine> engine, const std::string& names)
    : engine_(std::move(engine)), units_(engine_->hold_full(names)) {}
DataParallel::Full::~Full() {
  if (engine_) engine_->end_full(units_);
}
DataParallel::Full DataParallel::gather_full() { return {engine_, "*"}; }
DataParallel::Full DataParallel::unsharded(const std::string& names) {
  const Comm& ranks = comm();
  settle();
  const std::vector<std::string> all = ranks.all_gather_text(names);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    if (all[static_cast<size_t>(rank)] == all[0]) continue;
    throw ConfigError("unsharded() of '" + all[0] + "' on rank " + std::to_string(ranks.world_rank(0)) + " and of '" +
                      all[static_cast<size_t>(rank)] + "' on rank " + std::to_string(ranks.world_rank(rank)) +
                      ". Every rank names the same parameters");
  }
  if (std::none_of(all_.begin(), all_.end(), [&](const NamedTensor& p) { return matches(names, p.name); })) {
    throw ConfigError("unsharded() of '" + names + "': no parameter has such a name. The first is '" +
                      (all_.empty() ? std::string() : all_.front().name) + "'");
  }
  return {engine_, names};
}

void DataParallel::visit_full(const std::function<void(const NamedTensor&)>& visit) {
  std::unordered_map<const void*, std::vector<const NamedTensor*>> names;
  for (const NamedTensor& p : all_) names[p.tensor.unsafeGetTensorImpl()].push_back(&p);
  engine_->visit_full([&](const at::Tensor& t) {
    for (const NamedTensor* p : names.at(t.unsafeGetTensorImpl())) visit(*p);
  });
}

std::vector<NamedTensor> DataParallel::snapshot(std::optional<at::ScalarType> dtype) {
  const at::NoGradGuard no_grad;
  std::unordered_map<const void*, at::Tensor> copies;
  const auto copy = [&](const at::Tensor& t) {
    const bool convert = dtype && t.is_floating_point();
    copies.emplace(t.unsafeGetTensorImpl(), t.detach().to(convert ? *dtype : t.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                                                          at::MemoryFormat::Contiguous));
  };
  engine_->visit_full(copy);
  for (const NamedTensor& b : buffers_) copy(b.tensor);
  std::vector<NamedTensor> result;
  for (const auto* list : {&all_, &buffers_}) {
    for (const NamedTensor& t : *list) result.push_back({t.name, copies.at(t.tensor.unsafeGetTensorImpl())});
  }
  return result;
}

void DataParallel::write_shards(const std::function<void()>& write) { engine_->write_shards(write); }

void load_values(torch::nn::Module& module, const std::vector<NamedTensor>& values) {
  std::vector<NamedTensor> targets = named(module.named_parameters());
  for (NamedTensor& buffer : named(module.named_buffers())) targets.push_back(std::move(buffer));
  std::unordered_map<std::string, at::Tensor> missing;
  for (const NamedTensor& v : values) missing.emplace(v.name, v.tensor);
  Findings findings;
  std::vector<at::Tensor> sources;
  for (const NamedTensor& target : targets) {
    const auto found = missing.extract(target.name);
    sources.push_back(found ? found.mapped() : at::Tensor());
    if (!found) {
      findings.add(target.name, "the module has it, the values have not");
    } else if (found.mapped().sizes() != target.tensor.sizes()) {
      findings.add(target.name, c10::str("shape ", found.mapped().sizes(), ", in the module ", target.tensor.sizes()));
    }
  }
  for (const NamedTensor& v : values) {
    if (missing.contains(v.name)) findings.add(v.name, "the values have it, the module has not");
  }
  findings.throw_if_any("values of a module");
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets.size(); ++i) {
    nn::materialise(targets[i].tensor);
    targets[i].tensor.copy_(sources[i]);
  }
}

}  // namespace weft
