#include "weft/train/weights.h"

#include <fmt/format.h>

#include <filesystem>

#include "weft/checkpoint/safetensors.h"
#include "weft/config/parse.h"
#include "weft/core/error.h"
#include "weft/nn/placement.h"
#include "weft/train/agree.h"
#include "weft/train/stages.h"

namespace weft::train {
namespace {

constexpr const char* kTokenizerKey = "weft.tokenizer";

}  // namespace

std::vector<NamedTensor> whole_weights(const torch::nn::Module& module, bool keep) {
  std::vector<NamedTensor> tensors;
  for (const auto& parameter : module.named_parameters()) {
    const auto placement = nn::placement_of(parameter.value());
    const at::Tensor whole = placement ? nn::whole_tensor(parameter.value(), placement) : parameter.value();
    if (keep) tensors.push_back({parameter.key(), whole});
  }
  return tensors;
}

namespace {

/// Rank 0 of the world has each stage's tensors in turn.
void save_stages(DataParallel& dp, const Comm& world, const Job& job, const std::string& path) {
  std::vector<NamedTensor> mine;
  dp.visit_full([&](const NamedTensor& p) {
    const auto placement = nn::placement_of(p.tensor);
    const at::Tensor whole = placement ? nn::whole_tensor(p.tensor, placement) : p.tensor.detach().clone();
    if (dp.comm().rank() == 0) mine.push_back({p.name, whole});
  });
  const std::vector<NamedTensor> all = gather_stages(mine, dp.options().stages, parameter_names(job));
  on_rank_zero(world, [&] { checkpoint::write_safetensors(path, all, {{"format", "pt"}, {kTokenizerKey, job.tokenizer}}); });
}

}  // namespace

void save_weights(DataParallel& dp, const Comm& world, const Job& job, const std::string& path) {
  const at::NoGradGuard no_grad;
  if (dp.options().stages.size() > 1) return save_stages(dp, world, job, path);
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  on_rank_zero(world, [&] {
    std::vector<checkpoint::TensorEntry> entries;
    for (const NamedTensor& p : dp.all_parameters()) {
      const auto placement = nn::placement_of(p.tensor);
      entries.push_back({p.name, p.tensor.scalar_type(), placement ? placement->shape : p.tensor.sizes().vec()});
    }
    // "format" is what Hugging Face's readers ask for.
    writer = std::make_unique<checkpoint::SafetensorsWriter>(path, entries, checkpoint::Metadata{{"format", "pt"}, {kTokenizerKey, job.tokenizer}});
  });
  std::exception_ptr failed;  // the peers go on gathering, so this rank does too
  dp.visit_full([&](const NamedTensor& p) {
    const auto placement = nn::placement_of(p.tensor);
    const at::Tensor whole = placement ? nn::whole_tensor(p.tensor, placement) : p.tensor;
    if (!writer || failed) return;
    try {
      writer->write(p.name, whole);
    } catch (...) {
      failed = std::current_exception();
    }
  });
  on_rank_zero(world, [&] {
    if (failed) std::rethrow_exception(failed);
    writer->finish();
  });
}

TrainedModel load_run(const std::string& dir, bool averaged) {
  const config::RunConfig config = config::load(dir + "/config.toml");
  if (averaged && config.train.ema == 0) throw ConfigError(fmt::format("{} holds no averaged weights: it was trained with train.ema = 0", dir));
  const std::string path = dir + (averaged ? "/model_ema.safetensors" : "/model.safetensors");
  if (!std::filesystem::exists(path)) {
    throw ConfigError(fmt::format("{} is missing: a run writes it when it ends. Let it finish, or end it with SIGINT, which saves the "
                                  "weights after the current step", path));
  }
  const checkpoint::SafetensorsFile file(path);
  models::TransformerOptions options;
  options.dtype = scalar_type(config.train.dtype);
  TrainedModel result{.model = models::Transformer(config::model_spec(config, 0), options), .tokenizer = ""};
  std::vector<NamedTensor> values;
  for (const std::string& name : file.names()) values.push_back({name, file.tensor(name)});
  load_values(result.model, values);
  const auto tokenizer = file.metadata().find(kTokenizerKey);
  if (tokenizer != file.metadata().end()) result.tokenizer = tokenizer->second;
  return result;
}

}  // namespace weft::train
