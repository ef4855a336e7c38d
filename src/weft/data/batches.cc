#include "weft/data/batches.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>

#include "weft/core/error.h"

namespace weft::data {

TokenSamples::TokenSamples(TokenFile file, int64_t seq)
    : file_(std::move(file)), seq_(seq), size_(sample_count(file_.count(), seq)) {
  if (size_ < 1) {
    throw ConfigError(
        fmt::format("{} holds {} tokens; one sample of data.seq = {} needs {} (more text, or a shorter data.seq)",
                    file_.path(), file_.count(), seq, seq + 1));
  }
}

Batch TokenSamples::batch(const std::vector<int64_t>& samples) const {
  const auto rows = static_cast<int64_t>(samples.size());
  Batch batch{.inputs = at::empty({rows, seq_}, at::kLong),
              .targets = at::empty({rows, seq_}, at::kLong),
              .tokens = rows * seq_,
              .first_sample = 0};
  std::vector<int64_t> window(static_cast<size_t>(seq_) + 1);
  auto* inputs = batch.inputs.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<int64_t>();
  for (const int64_t sample : samples) {
    file_.read(sample * seq_, window);
    inputs = std::copy(window.begin(), window.end() - 1, inputs);
    targets = std::copy(window.begin() + 1, window.end(), targets);
  }
  return batch;
}

TrainBatches::TrainBatches(TokenSamples samples, Sampler sampler, int64_t global_batch, int64_t micro_batch,
                           int64_t dp_rank, int64_t dp_size)
    : samples_(std::move(samples)),
      sampler_(sampler),
      global_batch_(global_batch),
      micro_batch_(micro_batch),
      share_(share_of(global_batch, dp_size, dp_rank)) {}

int64_t TrainBatches::accumulation() const {
  return (share_.count + micro_batch_ - 1) / micro_batch_;
}

Batch TrainBatches::at(int64_t consumed, int64_t micro) const {
  const int64_t first = micro * micro_batch_;
  const int64_t count = std::min(micro_batch_, share_.count - first);
  if (count < 1) throw InternalError(fmt::format("micro-batch {} of {}", micro, accumulation()));
  std::vector<int64_t> chosen(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) chosen[static_cast<size_t>(i)] = sampler_.at(consumed + share_.begin + first + i);
  Batch batch = samples_.batch(chosen);
  batch.first_sample = share_.begin + first;
  return batch;
}

}  // namespace weft::data
