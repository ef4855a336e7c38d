#include "weft/optim/ema.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "weft/core/error.h"
#include "weft/memory/account.h"

namespace weft::optim {
namespace {

/// Elements of one task.
constexpr int64_t kGrain = 1 << 15;

/// A plain loop: an element's result does not depend on where it lies, as it may in a tensor operation's vectors and their rest.
template <class T>
void average(T* into, const T* from, int64_t n, double decay) {
  const auto keep = static_cast<T>(decay), add = static_cast<T>(1 - decay);
  for (int64_t i = 0; i < n; ++i) into[i] = into[i] * keep + from[i] * add;
}

void average(const at::Tensor& into, const at::Tensor& weight, double decay) {
  if (into.is_meta()) return;  // shapes only
  const at::Tensor w = weight.detach().view(-1), a = into.view(-1);
  at::parallel_for(0, a.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    for (int64_t i = begin; i < end; i += kGrain) {
      const int64_t n = std::min(kGrain, end - i);
      const at::Tensor from = w.narrow(0, i, n).to(a.scalar_type());
      if (a.scalar_type() == at::kDouble) {
        average(a.mutable_data_ptr<double>() + i, from.const_data_ptr<double>(), n, decay);
      } else {
        average(a.mutable_data_ptr<float>() + i, from.const_data_ptr<float>(), n, decay);
      }
    }
  });
}

/// Of tensors of one dtype, without a copy of either.
void exchange(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t i = 0; i < a.numel(); i += kGrain) {
    const int64_t n = std::min(kGrain, a.numel() - i);
    const at::Tensor left = a.view(-1).narrow(0, i, n), right = b.view(-1).narrow(0, i, n), copy = left.clone();
    left.copy_(right);
    right.copy_(copy);
  }
}

std::string key_of(size_t index) { return "average/" + std::to_string(index); }

}  // namespace

Ema::Ema(const DataParallel& dp, EmaOptions options) : options_(options), shards_(dp.shards()) {
  if (!(options_.decay >= 0 && options_.decay < 1)) {
    throw ConfigError("the decay of averaged weights is " + std::to_string(options_.decay) + "; it must be at least 0 and below 1. "
                      "Usual are 0.99 to 0.9999");
  }
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::optimizer);
  for (const NamedTensor& shard : shards_) {
    const auto& t = shard.tensor;
    if (t.is_complex()) throw ConfigError("parameter '" + shard.name + "' is complex; averages are of real parameters");
    averages_.push_back({shard.name, t.detach().to(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, /*non_blocking=*/false,
                                                   /*copy=*/true, at::MemoryFormat::Contiguous)});
  }
}

void Ema::update() {
  if (swapped_) throw ConfigError("Ema::update() while the averages are in the weights' place. Call swap() again first");
  const auto k = static_cast<double>(updates_++);
  const double decay = options_.warmup ? std::min(options_.decay, (1 + k) / (10 + k)) : options_.decay;
  const memory::Scope scope(memory::Category::optimizer);
  for (size_t i = 0; i < shards_.size(); ++i) average(averages_[i].tensor, shards_[i].tensor, decay);
}

void Ema::swap(DataParallel& dp) {
  const memory::Scope scope(memory::Category::optimizer);
  dp.write_shards([&] {
    const at::NoGradGuard no_grad;
    kept_.resize(shards_.size());
    for (size_t i = 0; i < shards_.size(); ++i) {
      const at::Tensor shard = shards_[i].tensor.detach(), &average = averages_[i].tensor;
      if (shard.scalar_type() == average.scalar_type()) {
        exchange(shard, average);
      } else if (swapped_) {
        shard.copy_(std::exchange(kept_[i], at::Tensor()));
      } else {
        kept_[i] = shard.clone();
        shard.copy_(average);
      }
    }
    swapped_ = !swapped_;
  });
}

void Ema::save(torch::serialize::OutputArchive& archive) const {
  archive.write("updates", c10::IValue(updates_));
  for (size_t i = 0; i < averages_.size(); ++i) archive.write(key_of(i), averages_[i].tensor, /*is_buffer=*/true);
}

void Ema::load(torch::serialize::InputArchive& archive) {
  Findings findings;
  std::vector<at::Tensor> stored(averages_.size());
  for (size_t i = 0; i < averages_.size(); ++i) {
    const auto& [name, average] = averages_[i];
    if (!archive.try_read(key_of(i), stored[i], /*is_buffer=*/true)) {
      findings.add(name, "the archive has no average of it");
    } else if (stored[i].sizes() != average.sizes()) {
      findings.add(name, c10::str("this rank has ", average.sizes(), " of it, the archive ", stored[i].sizes()));
    }
  }
  findings.throw_if_any("averaged weights");
  c10::IValue updates;
  archive.read("updates", updates);
  updates_ = updates.toInt();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < averages_.size(); ++i) averages_[i].tensor.copy_(stored[i]);
}

}  // namespace weft::optim
