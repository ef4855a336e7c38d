#include "weft/nn/vocab_parallel.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "weft/autograd/collectives.h"
#include "weft/core/error.h"
#include "weft/nn/fused.h"
#include "weft/nn/meta_shapes.h"

namespace weft::nn {
namespace {

/// On every rank an id that nobody has would be a row of zeros.
void check_tokens(const at::Tensor& tokens, int64_t vocab) {
  if (!tokens.is_cpu() || tokens.numel() == 0) return;
  const auto [least, most] = at::aminmax(tokens);
  for (const int64_t id : {least.item<int64_t>(), most.item<int64_t>()}) {
    if (id < 0 || id >= vocab) throw ConfigError(fmt::format("token {}: ids are 0 to {}. Check the vocabulary of the data.", id, vocab - 1));
  }
}

at::Tensor look_up(const at::Tensor& weight, const at::Tensor& tokens) {
  return weight.is_meta() ? embedding_shapes(weight, tokens) : at::embedding(weight, tokens);
}

/// Row numbers within the part, any legal one where `foreign` says that another rank has it.
struct OwnRows {
  at::Tensor rows, foreign;
};
OwnRows own_rows(const at::Tensor& ids, const layout::Part& part) {
  const at::Tensor rows = ids - part.begin;
  return {rows.clamp(0, part.size - 1), at::bitwise_or(rows < 0, rows >= part.size)};
}

/// Logits of all tokens, by operators that autograd knows.
at::Tensor plain_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets, int64_t ignore_index, double softcap,
                      const VocabPart& part) {
  const Comm& comm = part.tp.comm();
  at::Tensor logits = at::linear(hidden, weight);
  if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
  logits = soft_cap(logits, softcap);
  const at::Tensor largest = logits.detach().amax(1);  // [N]
  comm.all_reduce(largest, ReduceOp::max).wait();
  const at::Tensor sum = autograd::reduce_from(at::exp(logits - largest.unsqueeze(1)).sum(1), comm);
  const OwnRows own = own_rows(targets, part.rows);
  const at::Tensor at_target = logits.gather(1, own.rows.unsqueeze(1)).squeeze(1).masked_fill(own.foreign, 0);
  const at::Tensor losses = largest + at::log(sum) - autograd::reduce_from(at_target, comm);
  return losses.masked_fill(targets == ignore_index, 0).sum();
}

}  // namespace

at::Tensor look_up_part(const at::Tensor& weight, const at::Tensor& tokens, const layout::Part& part, int64_t all, const TensorAxis& tp) {
  check_tokens(tokens, all);
  const OwnRows own = own_rows(tokens, part);
  return tp.leave(look_up(weight, own.rows).masked_fill(own.foreign.unsqueeze(-1), 0));
}

VocabEmbeddingImpl::VocabEmbeddingImpl(VocabPart part, int64_t hidden, const at::TensorOptions& options) : part_(std::move(part)) {
  weight = register_parameter("weight", at::empty({part_.rows.size, hidden}, options));
}

at::Tensor VocabEmbeddingImpl::forward(const at::Tensor& tokens) {
  if (part_.tp.size() == 1) return look_up(weight, tokens);
  return look_up_part(weight, tokens, part_.rows, part_.vocab, part_.tp);
}

LossSum vocab_parallel_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                     int64_t ignore_index, double softcap, Kernels kernels, const VocabPart& part) {
  if (part.tp.size() == 1) return linear_cross_entropy(hidden, weight, targets, ignore_index, softcap, kernels);
  if (weight.size(0) != part.rows.size) {
    throw ConfigError(fmt::format("the weight has {} rows; this rank's part of {} is {}. Pass the rank's own rows: logits of the whole "
                                  "vocabulary would be counted once per rank", weight.size(0), part.vocab, part.rows.size));
  }
  const int64_t valid = count_targets(targets, ignore_index, part.vocab);
  if (kernels == Kernels::fused && softcap == 0 && fused::serves({hidden, weight})) {
    return {fused::linear_cross_entropy(hidden, weight, targets, ignore_index, &part), valid};
  }
  return {plain_loss(hidden, weight, targets, ignore_index, softcap, part), valid};
}

}  // namespace weft::nn
