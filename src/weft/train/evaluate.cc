#include "weft/train/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "weft/memory/account.h"
#include "weft/train/stages.h"

namespace weft::train {

double evaluate(models::Transformer& model, const data::TokenSamples& samples, int64_t limit, int64_t micro_batch,
                const Comm& comm, Pipeline* pipeline) {
  const at::NoGradGuard no_grad;
  const memory::Scope scope(memory::Category::activations);
  const int64_t total = limit > 0 ? std::min(limit, samples.size()) : samples.size();
  const data::Share share = data::share_of(total, comm.size(), comm.rank());
  model->eval();
  double sum = 0, count = 0;
  std::vector<data::Batch> waiting;  // micro-batches of one run of the pipeline
  std::vector<bool> counted;
  // Every rank does as many forward passes as the one with the largest share: a sharded model communicates in each.
  const int64_t largest = (total + comm.size() - 1) / comm.size();
  for (int64_t done = 0; done < largest; done += micro_batch) {
    const int64_t mine = std::clamp<int64_t>(share.count - done, 0, micro_batch);
    std::vector<int64_t> chosen(static_cast<size_t>(std::max<int64_t>(mine, 1)), 0);
    for (int64_t i = 0; i < mine; ++i) {
      chosen[static_cast<size_t>(i)] = (share.begin + done + i) * samples.size() / total;
    }
    const data::Batch batch = samples.batch(chosen);
    const bool counts = mine > 0;
    if (counts) count += static_cast<double>(batch.targets.ne(models::kIgnoreIndex).sum().item<int64_t>());
    if (pipeline != nullptr) {
      waiting.push_back(batch);
      counted.push_back(counts);
    } else if (const nn::LossSum loss = model->loss_sum(batch.inputs, batch.targets); counts) {
      sum += loss.sum.item<double>();
    }
  }
  if (pipeline != nullptr) sum = evaluate_pipeline(*pipeline, model, waiting, counted);
  model->train();
  const at::Tensor totals = at::tensor({sum, count}, at::kDouble);
  comm.all_reduce(totals).wait();
  return totals[0].item<double>() / totals[1].item<double>();
}

}  // namespace weft::train
