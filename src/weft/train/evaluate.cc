#include "weft/train/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "weft/memory/account.h"

namespace weft::train {

double evaluate(models::Transformer& model, const data::TokenSamples& samples, int64_t limit, int64_t micro_batch,
                const Comm& comm) {
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::activations);
  const int64_t total = limit > 0 ? std::min(limit, samples.size()) : samples.size();
  const data::Share share = data::share_of(total, comm.size(), comm.rank());
  model->eval();
  double sum = 0, count = 0;
  for (int64_t done = 0; done < share.count; done += micro_batch) {
    std::vector<int64_t> chosen(static_cast<size_t>(std::min(micro_batch, share.count - done)));
    for (size_t i = 0; i < chosen.size(); ++i) {
      chosen[i] = (share.begin + done + static_cast<int64_t>(i)) * samples.size() / total;
    }
    const data::Batch batch = samples.batch(chosen);
    const nn::LossSum loss = model->loss_sum(batch.inputs, batch.targets);
    sum += loss.sum.item<double>();
    count += static_cast<double>(loss.valid);
  }
  model->train();
  const at::Tensor totals = at::tensor({sum, count}, at::kDouble);
  comm.all_reduce(totals).wait();
  return totals[0].item<double>() / totals[1].item<double>();
}

}  // namespace weft::train
