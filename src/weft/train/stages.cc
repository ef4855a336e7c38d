#include "weft/train/stages.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <set>
#include <sstream>

#include "weft/core/error.h"
#include "weft/parallel/flat_view.h"

namespace weft::train {

StagePlan stage_plan(const Job& job) {
  const auto ranks = static_cast<int>(job.config.layout.pp), chunks = static_cast<int>(job.config.parallel.chunks);
  StagePlan plan{.parts = {}, .owner = {}, .maker = schedule::maker(job.config.parallel.schedule)};
  plan.owner = plan.maker({ranks, 1, chunks}).owner;
  plan.parts = models::stage_parts(job.spec, std::ssize(plan.owner), static_cast<double>(job.config.data.seq));
  return plan;
}

std::string to_text(const StagePlan& plan) {
  std::string text;
  for (size_t s = 0; s < plan.parts.size(); ++s) {
    const models::StagePart& part = plan.parts[s];
    std::vector<std::string> what;
    if (part.embedding) what.emplace_back("embedding");
    if (part.end == part.first + 1) what.push_back(fmt::format("layer {}", part.first));
    if (part.end > part.first + 1) what.push_back(fmt::format("layers {}-{}", part.first, part.end - 1));
    if (part.head) what.emplace_back("head");
    text += fmt::format("{}stage {} on rank {}: {}", text.empty() ? "" : "; ", s, plan.owner[s], fmt::join(what, ", "));
  }
  return text;
}

namespace {

PipelineBatch batch_of(const std::vector<data::Batch>& batches, int64_t update) {
  PipelineBatch batch{.micro_batches = static_cast<int>(batches.size()), .work = {}};
  for (const data::Batch& b : batches) {
    batch.work.inputs.push_back({b.inputs});
    batch.work.side.push_back(models::side_inputs(b.inputs, {.step = update, .first_sample = b.first_sample}));
  }
  return batch;
}

}  // namespace

double run_pipeline(Pipeline& pipeline, models::Transformer& model, const std::vector<data::Batch>& batches, int64_t tokens, int64_t update,
                    double gradient_scale, std::optional<double>& bubble) {
  PipelineBatch batch = batch_of(batches, update);
  batch.work.gradient_scale = gradient_scale;
  batch.work.loss = [&](int k, const std::vector<at::Tensor>& outputs) {
    return model->loss_of(outputs.at(0), batches[static_cast<size_t>(k)].targets).sum / static_cast<double>(tokens);
  };
  const PipelineResult result = pipeline.run(std::move(batch));
  bubble = result.bubble;
  return result.loss * static_cast<double>(tokens);
}

double evaluate_pipeline(Pipeline& pipeline, models::Transformer& model, const std::vector<data::Batch>& batches, const std::vector<bool>& counts) {
  PipelineBatch batch = batch_of(batches, 0);
  batch.work.loss = [&](int k, const std::vector<at::Tensor>& outputs) {
    const at::Tensor sum = model->loss_of(outputs.at(0), batches[static_cast<size_t>(k)].targets).sum;
    return counts[static_cast<size_t>(k)] ? sum : at::zeros_like(sum);
  };
  return pipeline.run(std::move(batch), /*forward_only=*/true).loss;
}

namespace {

/// A line per tensor: name, dtype (-1: undefined), sizes.
std::string listing(const std::vector<NamedTensor>& tensors) {
  std::string text;
  for (const NamedTensor& t : tensors) {
    text += fmt::format("{} {}", t.name, t.tensor.defined() ? static_cast<int>(t.tensor.scalar_type()) : -1);
    if (t.tensor.defined()) text += fmt::format(" {}", fmt::join(t.tensor.sizes(), " "));
    text += "\n";
  }
  return text;
}

struct Entry {
  int dtype = -1;
  std::vector<int64_t> sizes;
};

std::map<std::string, Entry> parse(const std::string& text) {
  std::map<std::string, Entry> entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    Entry entry;
    words >> name >> entry.dtype;
    for (int64_t size = 0; words >> size;) entry.sizes.push_back(size);
    entries.emplace(std::move(name), std::move(entry));
  }
  return entries;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const double largest = std::max(a.abs().max().item<double>(), std::numeric_limits<double>::min());
  const double d = (a - b).abs().max().item<double>() / largest;
  return std::isfinite(d) ? d : std::numeric_limits<double>::infinity();
}

}  // namespace

std::vector<NamedTensor> gather_stages(const std::vector<NamedTensor>& mine, const Comm& pp, std::vector<std::string> names,
                                       std::vector<std::pair<std::string, double>>* copies) {
  const at::NoGradGuard no_grad;
  std::vector<std::map<std::string, Entry>> of_rank;
  for (const std::string& text : pp.all_gather_text(listing(mine))) of_rank.push_back(parse(text));
  if (names.empty()) {
    std::set<std::string> seen;
    for (const auto& entries : of_rank) {
      for (const auto& [name, entry] : entries) {
        if (seen.insert(name).second) names.push_back(name);
      }
    }
  }
  std::map<std::string, at::Tensor> own;
  for (const NamedTensor& t : mine) own.emplace(t.name, t.tensor);
  std::vector<NamedTensor> result;
  for (const std::string& name : names) {
    at::Tensor first;
    bool found = false;
    for (int rank = 0; rank < pp.size(); ++rank) {
      const auto entry = of_rank[static_cast<size_t>(rank)].find(name);
      if (entry == of_rank[static_cast<size_t>(rank)].end()) continue;
      at::Tensor value;
      if (entry->second.dtype >= 0 && rank == pp.rank()) value = own.at(name).detach().contiguous();
      if (entry->second.dtype >= 0 && rank != 0) {
        if (pp.rank() == rank) pp.send(value, 0).released();
        if (pp.rank() == 0) {
          value = at::empty(entry->second.sizes, at::TensorOptions(static_cast<at::ScalarType>(entry->second.dtype)));
          pp.recv(value, rank).wait();
        }
      }
      if (pp.rank() == 0 && found && copies != nullptr && first.defined()) copies->emplace_back(name, value.defined() ? difference(first, value) : INFINITY);
      if (!std::exchange(found, true)) first = value;
    }
    if (found && pp.rank() == 0) result.push_back({name, first});
  }
  return result;
}

std::vector<std::string> parameter_names(const Job& job) {
  std::vector<std::string> names;
  for (const model::Param& p : model::parameter_table(job.spec)) names.push_back(p.name);
  return names;
}

double planned_bubble(const schedule::Schedule& schedule) {
  return schedule::run(schedule, schedule::Times::uniform(schedule.stage_count(), 1, 1, 1)).bubble();
}

}  // namespace weft::train
