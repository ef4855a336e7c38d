// How far training under other layouts is from training on one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

namespace train {
struct TrainingTrace;
}

/// One layout against one rank. A difference is max |a - b| / max |b| over a tensor's elements, with max |b| at least 1e-6 of the
/// largest gradient norm, 1e-3 of it below fp64 (weights: at least the learning rate, by which AdamW moves a weight); NaN is infinite.
struct VerifyRow {
  std::string layout;
  int ranks = 1;
  double loss = 0;       ///< largest of the steps
  double norm = 0;       ///< of the gradient before clipping, largest of the steps
  double gradient = 0;   ///< largest over all tensors, of the first step
  double weight = 0;     ///< the same of weights after the last step
  std::string first;     ///< what is out of tolerance first: "gradient of layers.0.attn.wq.weight", or why the layout failed; else empty
  bool ok() const { return first.empty(); }
};

struct VerifyReport {
  std::string dtype;
  int64_t steps = 0;
  double tolerance = 0;       ///< of gradients and weights
  double loss_tolerance = 0;
  std::vector<VerifyRow> rows;
  bool ok() const;
};

/// A table with a line per layout and a verdict.
std::string to_text(const VerifyReport& report);
std::string to_json(const VerifyReport& report);

namespace train {

/// An empty report. dtype: fp64, fp32, bf16 or fp16. tolerance 0: 1e-10 in fp64, 1e-5 of losses and 5e-4 of tensors in fp32, 5e-2 in 16 bits.
VerifyReport make_report(const std::string& dtype, int64_t steps, double tolerance);

/// Fills in `row`. What must be equal is looked at in the order in which a mistake shows: start values and their copies on other ranks,
/// gradients, copies after the steps, norms, weights, losses. rate: the learning rate.
void compare(const TrainingTrace& trace, const TrainingTrace& reference, double rate, const VerifyReport& report, VerifyRow& row);
/// The row of a layout that could not be run.
void fail(VerifyRow& row, const std::string& why);

/// What a reference must show for agreement to mean anything: ConfigError when the gradient is zero or not finite, or no weight moved.
void check_alive(const TrainingTrace& reference);

/// While it lives, operators run on one thread: ranks are threads of this process, which share its cores.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace train
}  // namespace weft
