// Loader: batches of a torch::data dataset for every rank, agreed between the ranks.
#pragma once

#include <torch/data/example.h>
#include <torch/data/samplers/base.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "weft/comm/comm.h"
#include "weft/data/sampler.h"

namespace weft::data {

struct LoaderOptions {
  int64_t batch = 1;          ///< rows per rank and step
  uint64_t seed = 0;          ///< order is a function of (seed, epoch, position) alone
  bool shuffle = true;
  bool drop_last = false;     ///< leave out a last step that is smaller than batch x ranks
  /// false: every rank can read the whole data set and takes its part of each global batch.
  /// true: the data set is this rank's own shard; ranks may hold different numbers of samples.
  bool own_shard = false;
};

/// Rows that this rank reads in one step; empty when it only takes part (its weight in the loss is 0).
using Rows = std::vector<size_t>;

/// Which rows each step of each epoch reads. Every rank gets the same number of steps. `position` is the only state:
/// samples consumed by all ranks since the start (with own_shard: steps since the start), so that a run resumes on any
/// number of ranks (with own_shard: on the same).
class StepPlan {
 public:
  /// Collective. samples: rows of the data set that this rank sees. Throws ConfigError for batch < 1 or no samples.
  StepPlan(int64_t samples, const Comm& comm, LoaderOptions options);

  int64_t steps_per_epoch() const;
  int64_t position() const { return position_; }
  const LoaderOptions& options() const { return options_; }
  /// position >= 0, as position() returned it.
  void seek(int64_t position);
  /// Rows of the next step, or nothing at the end of an epoch; the call after that begins the next epoch.
  std::optional<Rows> next();

 private:
  std::optional<Rows> next_of_whole();
  std::optional<Rows> next_of_own_shard();

  Sampler sampler_;
  LoaderOptions options_;
  int64_t rank_, ranks_;
  int64_t own_steps_ = 0;  // steps of the rank with most samples
  int64_t position_ = 0;
  bool epoch_ended_ = false;
};

/// The first `rows` rows of a batch, for the batch types of torch::data.
inline at::Tensor head(const at::Tensor& batch, int64_t rows) { return batch.narrow(0, 0, rows); }
template <class Data, class Target>
torch::data::Example<Data, Target> head(const torch::data::Example<Data, Target>& batch, int64_t rows) {
  return {head(batch.data, rows), head(batch.target, rows)};
}
template <class Element>
std::vector<Element> head(const std::vector<Element>& batch, int64_t rows) {
  return {batch.begin(), batch.begin() + rows};
}

/// Iterating a Loader runs to the end of the epoch, from wherever it stands: `for (auto& batch : *loader)`. A rank that has nothing to read in the last step gets
/// a batch of 0 rows: forward and backward on it take part in the reductions with weight 0 (see weft::global_mean).
template <class Dataset>
class Loader {
 public:
  using Batch = typename Dataset::BatchType;

  Loader(Dataset dataset, const Comm& comm, LoaderOptions options)
      : dataset_(std::move(dataset)), plan_(static_cast<int64_t>(dataset_.size().value()), comm, options) {}

  int64_t steps_per_epoch() const { return plan_.steps_per_epoch(); }
  /// State to save, and to restore with seek().
  int64_t position() const { return plan_.position(); }
  void seek(int64_t position) { plan_.seek(position); }

  class Iterator {
   public:
    explicit Iterator(Loader* loader) : loader_(loader) {}
    Batch& operator*() const { return *loader_->batch_; }
    Iterator& operator++() {
      loader_->read();
      return *this;
    }
    bool operator!=(std::default_sentinel_t) const { return loader_->batch_.has_value(); }

   private:
    Loader* loader_;
  };
  Iterator begin() {
    read();
    return Iterator(this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  void read() {
    const std::optional<Rows> rows = plan_.next();
    batch_.reset();
    if (!rows) return;
    // Nobody can build a batch of no rows but from a real one.
    batch_ = rows->empty() ? head(dataset_.get_batch(Rows{0}), 0) : dataset_.get_batch(*rows);
  }

  Dataset dataset_;
  StepPlan plan_;
  std::optional<Batch> batch_;
};

/// weft::data::loader(dataset, world.comm(), {.batch = 64, .seed = 1}); the data set is usually mapped with
/// torch::data::transforms::Stack. Collective.
template <class Dataset>
std::unique_ptr<Loader<Dataset>> loader(Dataset dataset, const Comm& comm, LoaderOptions options = {}) {
  return std::make_unique<Loader<Dataset>>(std::move(dataset), comm, options);
}

/// The same plan as a sampler for torch::data::make_data_loader: this rank's rows, epoch by epoch. The data loader's batch
/// size must be options.batch (ConfigError). Steps in which this rank has nothing to read are left out, since torch's
/// loader knows no empty batch: use Loader, or join_without_batch(), when the last step is uneven. State is one integer.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  DistributedSampler(int64_t samples, const Comm& comm, LoaderOptions options) : plan_(samples, comm, options) {}
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  std::optional<Rows> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  StepPlan plan_;
};

}  // namespace weft::data
