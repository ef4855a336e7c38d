// An average of the weights along training, kept on shards.
#pragma once

#include <type_traits>
#include <vector>

#include "weft/parallel/data_parallel.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}

namespace weft::optim {

struct EmaOptions {
  double decay = 0.999;  ///< at least 0, below 1
  /// Update number k (from 0) uses min(decay, (1 + k) / (10 + k)), so that the start values are soon forgotten (TensorFlow's
  /// ExponentialMovingAverage with num_updates).
  bool warmup = true;
};

/// Exponential moving average (Polyak and Juditsky 1992): after each update of the weights average = decay * average +
/// (1 - decay) * weight, element by element, so that numbers do not depend on the layout. Kept in fp32 (fp64 for fp64
/// weights) for this rank's elements of each trainable parameter: 4 bytes, divided by the ranks under ZeRO. Buffers are not
/// averaged: those of the moment are used.
///
///   optim::Ema ema(dp, {.decay = 0.999});
///   ...; optimizer.step(); ema.update();
///   ema.with_averages(dp, [&] { return evaluate(net); });   // forwards inside see the averages
class Ema {
 public:
  /// Starts from the present weights. ConfigError for a decay that is none.
  explicit Ema(const DataParallel& dp, EmaOptions options = {});

  /// Once after every update of the weights. No communication. ConfigError while the averages are in the weights' place.
  void update();

  /// Exchanges the weights of `dp`, the one that it was made with, and their averages on all ranks; the second call puts the
  /// weights back, bit by bit. What is written into the parameters between is lost. Between steps; collective.
  void swap(DataParallel& dp);
  bool swapped() const { return swapped_; }

  /// fn() with the averages in the weights' place, also when it throws. Collective; fn may communicate.
  template <class Fn>
  auto with_averages(DataParallel& dp, Fn&& fn) -> decltype(fn()) {
    swap(dp);
    try {
      if constexpr (std::is_void_v<decltype(fn())>) {
        fn();
        swap(dp);
      } else {
        auto result = fn();
        swap(dp);
        return result;
      }
    } catch (...) {
      if (swapped_) swap(dp);
      throw;
    }
  }

  /// By name, this rank's elements [n], fp32 or fp64. Not to be read while swapped.
  const std::vector<NamedTensor>& averages() const { return averages_; }
  int64_t updates() const { return updates_; }

  void save(torch::serialize::OutputArchive& archive) const;
  /// ConfigError when the archive is of other parameters or another layout.
  void load(torch::serialize::InputArchive& archive);

 private:
  EmaOptions options_;
  std::vector<NamedTensor> shards_, averages_;
  std::vector<at::Tensor> kept_;  // 16-bit weights while the averages are in their place
  int64_t updates_ = 0;
  bool swapped_ = false;
};

}  // namespace weft::optim
