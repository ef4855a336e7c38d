#include "weft/models/transformer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "weft/core/error.h"
#include "weft/models/check.h"
#include "weft/nn/init.h"
#include "weft/nn/placement.h"

namespace weft::models {

TransformerImpl::TransformerImpl(model::ModelSpec spec, TransformerOptions options)
    : spec_(std::move(spec)),
      options_(options),
      vocab_(options.tp, spec_.vocab),
      embedding_dropout_(spec_.dropout, options.seed, "tok", spec_.context) {
  check_buildable(spec_, options_);
  const auto make_norm = [&](const char* name) {
    return register_module(
        name, nn::Norm(spec_.hidden, spec_.norm, spec_.norm_bias, spec_.norm_eps, options_.kernels, options_.parameter(),
                       options_.tp.sequence_comm()));
  };
  tok = register_module("tok", Unit<nn::VocabEmbedding>(vocab_, spec_.hidden, options_.parameter()));
  if (spec_.tied_head) tok->dissolve();
  if (spec_.position == model::PositionKind::learned)
    pos = register_module("pos", nn::Embedding(spec_.context, spec_.hidden, options_.parameter(), options_.tp.sequence_comm()));
  if (spec_.embedding_norm) tok_norm = make_norm("tok_norm");
  auto list = std::make_shared<torch::nn::Module>();
  for (int64_t layer = 0; layer < spec_.layers(); ++layer)
    layers.push_back(list->register_module(std::to_string(layer), Unit<Block>(spec_, layer, options_)));
  register_module("layers", list);
  norm = make_norm("norm");
  if (!spec_.tied_head) head = register_module("head", Unit<nn::Linear>(spec_.hidden, vocab_.rows.size, false, options_.parameter()));
  initialise();
}

void TransformerImpl::initialise() {
  const auto parameters = named_parameters();
  const std::vector<model::Param> table = model::parameter_table(spec_);
  if (parameters.size() != table.size())
    throw InternalError(fmt::format("the model registers {} parameters, the table has {}", parameters.size(), table.size()));
  for (size_t i = 0; i < table.size(); ++i) {
    const std::string& name = parameters[i].key();
    const at::Tensor& tensor = parameters[i].value();
    const layout::ParamPart part = layout::param_part(table[i], spec_, options_.tp.size(), options_.tp.rank());
    std::vector<int64_t> shape = table[i].shape;
    if (part.dim >= 0) shape[static_cast<size_t>(part.dim)] = part.part.size;
    if (name != table[i].name || tensor.sizes() != at::IntArrayRef(shape))
      throw InternalError(fmt::format("parameter {} of the model is {}, the table has {}", i, name, table[i].name));
    auto values = nn::rule_values(name, table[i].init, options_.seed);
    if (part.dim >= 0) values = nn::values_of_part(values, table[i].shape, part.dim, part.part.begin, part.part.size);
    if (!tensor.is_meta()) values->write(0, tensor.detach().view({-1}));
    if (options_.deferred) nn::set_start_values(tensor, values);
    if (options_.tp.size() > 1) {
      nn::set_placement(tensor, {.comm = options_.tp.comm(), .shape = table[i].shape, .dim = part.dim, .begin = part.part.begin, .copies = part.copies});
    }
  }
}

nn::TokenPlace TransformerImpl::local_place(int64_t tokens, nn::TokenPlace place) const {
  place.first_position += options_.tp.first_token(tokens);
  return place;
}

at::Tensor TransformerImpl::embed(const at::Tensor& tokens, const nn::TokenPlace& all) {
  const nn::TokenPlace place = local_place(tokens.size(1), all);
  at::Tensor x = tok(tokens);  // [B, T, D]
  if (spec_.embedding_scale != 1.0) x = x * spec_.embedding_scale;
  if (pos) {
    const int64_t first = place.first_position;
    x = x + pos(at::arange(first, first + x.size(1), tokens.options()));
  }
  if (tok_norm) x = tok_norm(x);
  return is_training() ? embedding_dropout_(x, place) : x;
}

BlockInputs TransformerImpl::block_inputs(int64_t tokens, const nn::TokenPlace& place) {
  const int64_t end = place.first_position + tokens;
  if (end > spec_.context)
    throw ConfigError(fmt::format("positions {} to {} exceed the model's context of {} tokens; use shorter sequences or a "
                                  "model with a longer context.", place.first_position, end - 1, spec_.context));
  BlockInputs inputs{.rope = {}, .place = local_place(tokens, place)};
  if (spec_.position != model::PositionKind::rope) return inputs;
  if (!rope_.cos.defined() || rope_.cos.size(0) < end)
    rope_ = nn::rope_table(spec_.rope, spec_.blocks.front().attention.head_dim, end, options_.tensor());
  inputs.rope = {rope_.cos.narrow(0, place.first_position, tokens), rope_.sin.narrow(0, place.first_position, tokens)};
  return inputs;
}

at::Tensor TransformerImpl::forward(const at::Tensor& tokens, const nn::TokenPlace& place) {
  const BlockInputs inputs = block_inputs(tokens.size(1), place);
  at::Tensor x = embed(tokens, place);
  for (auto& block : layers) x = block(x, inputs);
  return norm(x);
}

at::Tensor TransformerImpl::logits(const at::Tensor& tokens) {
  if (options_.tp.size() > 1) throw ConfigError("logits() with tensor parallelism: each rank has some columns of them. Use loss_sum(), or load the weights without it");
  const at::Tensor hidden = forward(tokens);
  return with_head_weight([&](const at::Tensor& weight) { return nn::soft_cap(at::linear(hidden, weight), spec_.logit_softcap); });
}

nn::LossSum TransformerImpl::loss_sum(const at::Tensor& tokens, const at::Tensor& targets, int64_t ignore_index,
                                      const nn::TokenPlace& place) {
  if (targets.sizes() != tokens.sizes())
    throw ConfigError(fmt::format("{} targets for {} tokens; both must be [batch, sequence].", targets.numel(), tokens.numel()));
  const at::Tensor hidden = options_.tp.enter(forward(tokens, place));
  return with_head_weight([&](const at::Tensor& weight) {
    return nn::vocab_parallel_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), ignore_index, spec_.logit_softcap,
                                            options_.kernels, vocab_);
  });
}

}  // namespace weft::models
