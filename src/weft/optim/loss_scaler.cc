#include "weft/optim/loss_scaler.h"

#include <torch/serialize/archive.h>

#include <cmath>
#include <limits>

#include "weft/core/error.h"

namespace weft::optim {
namespace {

bool agree_finite(double norm, const Comm& comm) {
  const at::Tensor overflowed = at::full({1}, std::isfinite(norm) ? 0.0 : 1.0, at::kDouble);
  comm.all_reduce(overflowed, ReduceOp::max).wait();
  return overflowed.item<double>() == 0;
}

void check(const LossScalerOptions& o) {
  Findings findings;
  if (!(o.initial > 0) || !std::isfinite(o.initial)) findings.add("initial", std::to_string(o.initial) + " is not above 0");
  if (!(o.growth >= 1)) findings.add("growth", std::to_string(o.growth) + " is below 1");
  if (!(o.backoff > 0 && o.backoff < 1)) findings.add("backoff", std::to_string(o.backoff) + " is not between 0 and 1");
  if (o.growth_interval < 1) findings.add("growth_interval", std::to_string(o.growth_interval) + " is below 1");
  findings.throw_if_any("loss scaler");
}

}  // namespace

LossScaler::LossScaler(LossScalerOptions options) : options_(options), scale_(options.initial) { check(options_); }

at::Tensor LossScaler::scale(const at::Tensor& loss) const {
  return (loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat)) * scale_;
}

bool LossScaler::unscale(DataParallel& dp) {
  // The largest gradient, not a sum of squares, which would overflow by itself.
  const double largest = dp.grad_norm(std::numeric_limits<double>::infinity());
  if (!agree_finite(largest, dp.comm())) {
    dp.zero_grad();
    dp.continue_accumulation();  // there will be no step
    ++skipped_;
    clean_ = 0;
    if (scale_ <= options_.smallest) {
      throw ConfigError("gradients are not finite even with a loss scale of " + std::to_string(scale_) +
                        ": training diverged, or the model needs a wider range than fp16 has. Use bf16 or fp32, or a lower "
                        "learning rate");
    }
    scale_ *= options_.backoff;
    return false;
  }
  const at::NoGradGuard no_grad;
  for (const NamedTensor& p : dp.shards()) {
    if (p.tensor.grad().defined()) p.tensor.mutable_grad().mul_(1 / scale_);
  }
  if (++clean_ >= options_.growth_interval) {
    scale_ *= options_.growth;
    clean_ = 0;
  }
  return true;
}

void LossScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(scale_));
  archive.write("clean", c10::IValue(clean_));
  archive.write("skipped", c10::IValue(skipped_));
}

void LossScaler::load(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("scale", value);
  scale_ = value.toDouble();
  archive.read("clean", value);
  clean_ = value.toInt();
  archive.read("skipped", value);
  skipped_ = value.toInt();
}

}  // namespace weft::optim
