#include "weft/models/generate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "weft/core/error.h"
#include "weft/core/philox.h"

namespace weft::models {
namespace {

/// Feeds tokens at positions first .. and returns the logits [V] (fp64) after the last of them.
std::vector<double> read(Transformer& model, const std::vector<int64_t>& tokens, int64_t first, std::vector<nn::KeyValues>& cache) {
  const auto length = static_cast<int64_t>(tokens.size());
  at::Tensor ids = at::empty({1, length}, at::kLong);
  std::copy(tokens.begin(), tokens.end(), ids.mutable_data_ptr<int64_t>());
  const nn::TokenPlace place{.first_position = first};
  BlockInputs inputs = model->block_inputs(length, place);
  inputs.cache = &cache;
  at::Tensor x = model->embed(ids.to(model->options().device), place);
  for (auto& block : model->layers) x = block(x, inputs);
  const at::Tensor last = model->norm(x.narrow(1, length - 1, 1));
  const at::Tensor logits =
      model->with_head_weight([&](const at::Tensor& weight) { return nn::soft_cap(at::linear(last, weight), model->spec().logit_softcap); })
          .flatten().to(at::kCPU).to(at::kDouble).contiguous();
  const double* values = logits.const_data_ptr<double>();
  return {values, values + logits.numel()};
}

/// Ties go to the lower id, so the result does not depend on the sort.
int64_t choose(const std::vector<double>& logits, const GenerateOptions& options, double uniform) {
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int64_t a, int64_t b) {
    const double x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const int64_t all = std::ssize(order);
  const int64_t kept = options.temperature == 0 ? 1 : options.top_k > 0 ? std::min(options.top_k, all) : all;
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), likelier);
  if (kept == 1) return order[0];
  const double largest = logits[static_cast<size_t>(order[0])];
  std::vector<double> upto;  // running sums of the weights
  for (int64_t i = 0; i < kept; ++i)
    upto.push_back((upto.empty() ? 0.0 : upto.back()) +
                   std::exp((logits[static_cast<size_t>(order[static_cast<size_t>(i)])] - largest) / options.temperature));
  const auto found = std::upper_bound(upto.begin(), upto.end(), uniform * upto.back());
  return order[static_cast<size_t>(std::min<int64_t>(found - upto.begin(), kept - 1))];
}

}  // namespace

std::vector<int64_t> generate(Transformer& model, const std::vector<int64_t>& prompt, int64_t count, const GenerateOptions& options) {
  const model::ModelSpec& spec = model->spec();
  Findings findings;
  if (prompt.empty()) findings.add("prompt", "has no token; the model continues at least one");
  for (const int64_t token : prompt)
    if (token < 0 || token >= spec.vocab) findings.add("prompt", fmt::format("holds token {}; ids are 0 to {}", token, spec.vocab - 1));
  if (!(options.temperature >= 0)) findings.add("temperature", fmt::format("is {}; it must be at least 0", options.temperature));
  if (options.top_k < 0) findings.add("top_k", fmt::format("is {}; it must be at least 0", options.top_k));
  if (!model->is_whole()) findings.add("pp", "this rank has some pipeline stages of the model; text is generated on one", "load the run's weights");
  if (model->options().tp.size() > 1)
    findings.add("tp", fmt::format("{} ranks share the model out; text is generated on one", model->options().tp.size()), "load the run's weights");
  findings.throw_if_any("generate");

  const at::NoGradGuard no_gradients;
  const bool training = model->is_training();
  model->eval();
  const uint64_t stream = philox::stream_of("generate");
  std::vector<nn::KeyValues> cache(spec.blocks.size());
  std::vector<int64_t> text = prompt, unread = prompt;
  int64_t seen = 0;
  const auto reread_from = [&](int64_t length) {
    unread.assign(text.end() - std::min<int64_t>(length, std::ssize(text)), text.end());
    cache.assign(spec.blocks.size(), {});
    seen = 0;
  };
  if (std::ssize(prompt) > spec.context) reread_from(spec.context);
  for (int64_t i = 0; i < count; ++i) {
    if (seen + std::ssize(unread) > spec.context) reread_from(std::max<int64_t>(1, spec.context / 2));
    const std::vector<double> logits = read(model, unread, seen, cache);
    seen += std::ssize(unread);
    const int64_t token = choose(logits, options, philox::uniform(options.seed, stream, static_cast<uint64_t>(i)));
    text.push_back(token);
    unread = {token};
  }
  model->train(training);
  return {text.end() - count, text.end()};
}

}  // namespace weft::models
