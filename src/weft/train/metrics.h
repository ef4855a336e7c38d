// What a training step leaves behind: one line of metrics.jsonl, one line on the screen.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weft/memory/account.h"

namespace weft::train {

/// One optimizer update. metrics.jsonl has these as keys:
///   step          updates done, from 1
///   loss          mean loss in nats per target over the step's global batch, before the update
///   val_loss      mean loss over the validation samples after the update; null when not measured
///   val_loss_ema  the same of the averaged weights; null without train.ema
///   tokens_per_s  targets of the step over all ranks / step_s
///   grad_norm     global norm of the gradient before clipping
///   lr            learning rate of the update
///   tokens        targets seen since the start, over all ranks
///   epoch         samples seen / samples of the training file
///   step_s        seconds of the step, without validation and output
///   elapsed_s     seconds since the start of the run, validation included
///   skipped       fp16: gradients overflowed, no update was made, the schedule stands still; grad_norm is 0
///   loss_scale    fp16: factor of the next step's loss; null in other dtypes
///   bubble        share of the pipeline ranks' time of the step that is not compute; null without pipeline parallelism
///   memory        bytes that tensors of rank 0 held at their peak so far, by category (docs/memory.md); null when not counted
struct StepRecord {
  int64_t step = 0;
  double loss = 0;
  std::optional<double> val_loss, val_loss_ema;
  double tokens_per_s = 0;
  double grad_norm = 0;
  double lr = 0;
  int64_t tokens = 0;
  double epoch = 0;
  double step_s = 0;
  double elapsed_s = 0;
  bool skipped = false;
  std::optional<double> loss_scale, bubble;
  std::optional<memory::Amounts> memory;
};

/// {"parameters": 1024, ..., "other": 0}.
std::string to_json(const memory::Amounts& amounts);

/// One line of JSON, without the newline.
std::string to_json(const StepRecord& record);

/// "step 120/500  loss 1.8342  val 1.9011  3.1k tok/s  grad 0.81  lr 2.0e-03  left 1:42".
std::string to_line(const StepRecord& record, int64_t total_steps, std::optional<double> seconds_left);

/// "4.2k", "1.3M": three significant digits.
std::string short_number(double value);
/// "0:07", "12:30", "3:02:11".
std::string clock_time(double seconds);

}  // namespace weft::train
