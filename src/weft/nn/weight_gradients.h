// Backward in two halves, for zero-bubble pipelines: first gradients of inputs, later gradients of weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "weft/comm/comm.h"

namespace weft::nn {

/// Where layers put the products that make their weights' gradients, instead of computing them in backward. What a weight gradient needs
/// (the layer's input and the gradient of its output) stays alive until run(). One rank's thread at a time.
/// Source of the split: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.
class WeightGradients {
 public:
  /// What is put from here on belongs to `key` (a micro-batch of a stage).
  void begin(int64_t key) { key_ = key; }
  void put(at::Tensor weight, Comm copies, std::function<at::Tensor()> product);
  /// Computes what belongs to `key` and hands it to the weights as one backward() would: hooks on parameters run, and it is added to grad(). No-op when
  /// there is nothing.
  void run(int64_t key);
  /// Drops everything (a step that failed).
  void clear() { owed_.clear(); }
  /// Weight gradients that are owed.
  size_t owed() const;

 private:
  struct Entry {
    at::Tensor weight;
    Comm copies;  ///< ranks that hold the same weight and compute a part of its gradient each
    std::function<at::Tensor()> product;
  };
  int64_t key_ = 0;
  std::map<int64_t, std::vector<Entry>> owed_;
};

/// A module whose weight matrices' gradients can be put off. Biases' are computed with the input's.
class SplitsBackward {
 public:
  SplitsBackward() = default;
  /// A copy (clone()) is no stage's yet.
  SplitsBackward(const SplitsBackward&) {}
  SplitsBackward& operator=(const SplitsBackward&) { return *this; }
  virtual ~SplitsBackward() = default;

  /// From the next forward on; null: backward computes everything, as ever.
  void put_off_to(std::shared_ptr<WeightGradients> gradients) { gradients_ = std::move(gradients); }

 protected:
  /// at::linear. copies: as WeightGradients::Entry's; the weight is the parameter itself.
  at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const Comm& copies = Comm()) const;

 private:
  std::shared_ptr<WeightGradients> gradients_;
};

}  // namespace weft::nn
