#include "weft/data/loader.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include "weft/core/error.h"

namespace weft::data {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t largest(int64_t value, const Comm& comm) {
  if (comm.size() == 1) return value;
  at::Tensor all = at::full({1}, value, at::kLong);
  comm.all_reduce(all, ReduceOp::max).wait();
  return all.item<int64_t>();
}

LoaderOptions checked(int64_t samples, LoaderOptions options) {
  if (options.batch < 1) throw ConfigError("batch is " + std::to_string(options.batch) + "; a rank reads at least 1 row a step");
  if (samples < 1 && !options.own_shard) throw ConfigError("the data set holds no samples; a loader needs at least one");
  return options;
}

}  // namespace

StepPlan::StepPlan(int64_t samples, const Comm& comm, LoaderOptions options)
    : sampler_(std::max<int64_t>(samples, 1), options.seed, options.shuffle),
      options_(checked(samples, options)),
      rank_(comm.rank()),
      ranks_(comm.size()) {
  if (!options.own_shard) return;
  if (samples < 1) throw ConfigError("rank " + std::to_string(rank_) + "'s shard holds no samples; give each rank at least one");
  own_steps_ = largest(ceil_div(samples, options.batch), comm);
}

int64_t StepPlan::steps_per_epoch() const {
  if (options_.own_shard) return own_steps_;
  const int64_t global = options_.batch * ranks_;
  return options_.drop_last ? sampler_.samples() / global : ceil_div(sampler_.samples(), global);
}

void StepPlan::seek(int64_t position) {
  if (position < 0) throw ConfigError("position is " + std::to_string(position) + "; it must be what position() returned");
  position_ = position;
  epoch_ended_ = false;
}

std::optional<Rows> StepPlan::next() {
  if (std::exchange(epoch_ended_, false)) return std::nullopt;
  return options_.own_shard ? next_of_own_shard() : next_of_whole();
}

std::optional<Rows> StepPlan::next_of_whole() {
  const int64_t samples = sampler_.samples(), global = options_.batch * ranks_;
  const int64_t left = samples - position_ % samples;
  if (options_.drop_last && left < global) {
    position_ += left;
    return std::nullopt;
  }
  const int64_t taken = std::min(global, left);
  const Share mine = share_of(taken, ranks_, rank_);
  Rows rows;
  for (int64_t i = 0; i < mine.count; ++i) rows.push_back(static_cast<size_t>(sampler_.at(position_ + mine.begin + i)));
  position_ += taken;
  epoch_ended_ = taken == left;
  return rows;
}

std::optional<Rows> StepPlan::next_of_own_shard() {
  const int64_t samples = sampler_.samples();
  const int64_t epoch = position_ / own_steps_, step = position_ % own_steps_;
  const int64_t begin = std::min(step * options_.batch, samples), end = std::min(begin + options_.batch, samples);
  Rows rows;
  for (int64_t i = begin; i < end; ++i) rows.push_back(static_cast<size_t>(sampler_.at(epoch * samples + i)));
  ++position_;
  epoch_ended_ = step + 1 == own_steps_;
  return rows;
}

// An epoch that was left half-way goes on where it stopped: the position is the only state.
void DistributedSampler::reset(std::optional<size_t>) {}

std::optional<Rows> DistributedSampler::next(size_t batch_size) {
  if (static_cast<int64_t>(batch_size) != plan_.options().batch) {
    throw ConfigError("the data loader asks for batches of " + std::to_string(batch_size) + ", the sampler was made for " +
                      std::to_string(plan_.options().batch) + "; use one number for both");
  }
  for (;;) {
    std::optional<Rows> rows = plan_.next();
    if (!rows || !rows->empty()) return rows;
  }
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("position", at::full({}, plan_.position(), at::kLong), /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  at::Tensor position;
  archive.read("position", position, /*is_buffer=*/true);
  plan_.seek(position.item<int64_t>());
}

}  // namespace weft::data
