#include "weft/train/weights.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "weft/checkpoint/safetensors.h"
#include "weft/config/parse.h"
#include "weft/core/error.h"

namespace weft::train {
namespace {

constexpr const char* kTokenizerKey = "weft.tokenizer";

}  // namespace

void save_weights(models::Transformer& model, const Job& job, const std::string& path) {
  std::vector<NamedTensor> tensors;
  for (const auto& parameter : model->named_parameters()) tensors.push_back({parameter.key(), parameter.value()});
  // "format" is what Hugging Face's readers ask for.
  checkpoint::write_safetensors(path, tensors, {{"format", "pt"}, {kTokenizerKey, job.tokenizer}});
}

TrainedModel load_run(const std::string& dir) {
  const config::RunConfig config = config::load(dir + "/config.toml");
  const checkpoint::SafetensorsFile file(dir + "/model.safetensors");
  models::TransformerOptions options;
  options.dtype = scalar_type(config.train.dtype);
  TrainedModel result{.model = models::Transformer(config::model_spec(config, 0), options), .tokenizer = ""};
  const at::NoGradGuard no_grad;
  for (const auto& parameter : result.model->named_parameters()) {
    const at::Tensor stored = file.tensor(parameter.key());
    if (stored.sizes() != parameter.value().sizes()) {
      throw ConfigError(fmt::format("{}: tensor {} has another shape than config.toml's model", dir, parameter.key()));
    }
    at::Tensor(parameter.value()).copy_(stored);
  }
  const auto tokenizer = file.metadata().find(kTokenizerKey);
  if (tokenizer != file.metadata().end()) result.tokenizer = tokenizer->second;
  return result;
}

}  // namespace weft::train
