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
  const std::vector<StagePart> parts = options_.parts.empty() ? std::vector{StagePart{0, spec_.layers(), true, true}} : options_.parts;
  const auto any = [&](auto has) { return std::any_of(parts.begin(), parts.end(), has); };
  const bool first = any([](const StagePart& part) { return part.embedding; }), last = any([](const StagePart& part) { return part.head; });
  if (first || (last && spec_.tied_head)) tok = register_module("tok", Unit<nn::VocabEmbedding>(vocab_, spec_.hidden, options_.parameter()));
  if (tok && spec_.tied_head) tok->dissolve();
  if (first && spec_.position == model::PositionKind::learned)
    pos = register_module("pos", nn::Embedding(spec_.context, spec_.hidden, options_.parameter(), options_.tp.sequence_comm()));
  if (first && spec_.embedding_norm) tok_norm = make_norm("tok_norm");
  auto list = std::make_shared<torch::nn::Module>();
  for (int64_t layer = 0; layer < spec_.layers(); ++layer) {
    const bool here = any([layer](const StagePart& part) { return part.first <= layer && layer < part.end; });
    layers.push_back(here ? list->register_module(std::to_string(layer), Unit<Block>(spec_, layer, options_)) : Unit<Block>(nullptr));
  }
  register_module("layers", list);
  if (last) norm = make_norm("norm");
  if (last && !spec_.tied_head) head = register_module("head", Unit<nn::Linear>(spec_.hidden, vocab_.rows.size, false, options_.parameter()));
  initialise();
}

void TransformerImpl::initialise() {
  const auto parameters = named_parameters();
  std::vector<model::Param> table = model::parameter_table(spec_);
  if (!is_whole()) std::erase_if(table, [&](const model::Param& p) { return !holds(options_.parts, p, spec_.tied_head); });
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

bool holds(const std::vector<StagePart>& parts, const model::Param& param, bool tied_head) {
  const auto in = [&](const StagePart& part) {
    if (param.layer >= 0) return part.first <= param.layer && param.layer < part.end;
    const bool table = param.name == "tok.weight";
    const bool behind = param.name.starts_with("norm.") || param.name.starts_with("head.") || (table && tied_head);
    return (behind && part.head) || (part.embedding && (table || param.name.starts_with("pos.") || param.name.starts_with("tok_norm.")));
  };
  return std::any_of(parts.begin(), parts.end(), in);
}

void TransformerImpl::check_whole(const char* what) const {
  if (!is_whole()) throw ConfigError(fmt::format("{} of a model of which this rank has some pipeline stages; run it through the pipeline, or load the weights without one", what));
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

at::Tensor TransformerImpl::forward_part(const StagePart& part, const at::Tensor& given, const at::Tensor& tokens, const nn::TokenPlace& place) {
  const BlockInputs inputs = block_inputs(tokens.size(1), place);
  at::Tensor x = part.embedding ? embed(tokens, place) : given;
  for (int64_t layer = part.first; layer < part.end; ++layer) x = layers[static_cast<size_t>(layer)](x, inputs);
  return part.head ? norm(x) : x;
}

at::Tensor TransformerImpl::forward(const at::Tensor& tokens, const nn::TokenPlace& place) {
  check_whole("forward()");
  return forward_part({0, spec_.layers(), true, true}, {}, tokens, place);
}

std::shared_ptr<torch::nn::Module> TransformerImpl::modules_of(const StagePart& part) {
  auto modules = std::make_shared<torch::nn::Module>("Stage");
  const auto add = [&](const std::string& name, const auto& module) {
    if (module) modules->register_module(name, std::shared_ptr<torch::nn::Module>(module.ptr()));
  };
  if (part.embedding || (part.head && spec_.tied_head)) add("tok", tok);
  if (part.embedding) add("pos", pos), add("tok_norm", tok_norm);
  for (int64_t layer = part.first; layer < part.end; ++layer) add(fmt::format("layer{}", layer), layers[static_cast<size_t>(layer)]);
  if (part.head) add("norm", norm), add("head", head);
  return modules;
}

at::Tensor TransformerImpl::logits(const at::Tensor& tokens) {
  check_whole("logits()");
  if (options_.tp.size() > 1) throw ConfigError("logits() with tensor parallelism: each rank has some columns of them. Use loss_sum(), or load the weights without it");
  const at::Tensor hidden = forward(tokens);
  return with_head_weight([&](const at::Tensor& weight) { return nn::soft_cap(at::linear(hidden, weight), spec_.logit_softcap); });
}

nn::LossSum TransformerImpl::loss_sum(const at::Tensor& tokens, const at::Tensor& targets, int64_t ignore_index,
                                      const nn::TokenPlace& place) {
  if (targets.sizes() != tokens.sizes())
    throw ConfigError(fmt::format("{} targets for {} tokens; both must be [batch, sequence].", targets.numel(), tokens.numel()));
  return loss_of(forward(tokens, place), targets, ignore_index);
}

nn::LossSum TransformerImpl::loss_of(const at::Tensor& normed, const at::Tensor& targets, int64_t ignore_index) {
  const at::Tensor hidden = options_.tp.enter(normed);
  return with_head_weight([&](const at::Tensor& weight) {
    return nn::vocab_parallel_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), ignore_index, spec_.logit_softcap,
                                            options_.kernels, vocab_);
  });
}

}  // namespace weft::models
