// A decoder-only language model built from a ModelSpec.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "weft/models/block.h"
#include "weft/nn/functional.h"
#include "weft/nn/unit.h"
#include "weft/nn/vocab_parallel.h"

namespace weft::models {

/// Target value of positions that take no part in the loss (PyTorch's default).
inline constexpr int64_t kIgnoreIndex = -100;

/// Whether one of `parts` has this parameter. A tied head is the embedding.
bool holds(const std::vector<StagePart>& parts, const model::Param& param, bool tied_head);

/// Token embedding, blocks, final norm, head. named_parameters() has the names, shapes and order of
/// model::parameter_table(spec); initial weights follow its rules and depend on (seed, name, index) alone.
///
/// Errors: ConfigError, with every finding, when the spec asks for what the runtime has not (experts, latent attention,
/// ALiBi, prediction modules) or its sizes do not fit together; when a sequence is longer than spec.context.
class TransformerImpl : public torch::nn::Module {
 public:
  explicit TransformerImpl(model::ModelSpec spec, TransformerOptions options = {});

  /// tokens [B, T] int64 -> hidden states after the final norm [B, T, D], of this rank's part of T with sequence parallelism.
  at::Tensor forward(const at::Tensor& tokens, const nn::TokenPlace& place = {});
  /// [B, T] -> [B, T, V], in the model's dtype. ConfigError with several tensor-parallel ranks, each of which has some columns.
  at::Tensor logits(const at::Tensor& tokens);
  /// Sum of the cross-entropy of all positions (targets [B, T] int64), and how many count. Divide by one global count. Tensor-parallel
  /// ranks pass the same tokens and get the same result.
  nn::LossSum loss_sum(const at::Tensor& tokens, const at::Tensor& targets, int64_t ignore_index = kIgnoreIndex,
                       const nn::TokenPlace& place = {});

  /// One stretch of forward (options().parts): of tokens [B, T] for the one with the embedding, else of hidden states. -> hidden states, after the final
  /// norm for the one with the head. tokens: [B, T], of which the shape counts.
  at::Tensor forward_part(const StagePart& part, const at::Tensor& x, const at::Tensor& tokens, const nn::TokenPlace& place);
  /// loss_sum of hidden states after the final norm.
  nn::LossSum loss_of(const at::Tensor& hidden, const at::Tensor& targets, int64_t ignore_index = kIgnoreIndex);
  /// Whether this rank has all of the model.
  bool is_whole() const { return options_.parts.empty(); }
  /// Modules of a stretch, under their names.
  std::shared_ptr<torch::nn::Module> modules_of(const StagePart& part);

  /// The parts of forward, for those who run them apart. positions are place.first_position + 0 .. T-1.
  at::Tensor embed(const at::Tensor& tokens, const nn::TokenPlace& place);
  BlockInputs block_inputs(int64_t tokens, const nn::TokenPlace& place);
  /// fn(weight): the head's weight [V, D], or the embedding's when tied; this rank's rows of it.
  template <class F>
  auto with_head_weight(F&& fn) {
    return spec_.tied_head ? fn(tok->weight) : head->around([&] { return fn(head->weight); });
  }

  const model::ModelSpec& spec() const { return spec_; }
  const TransformerOptions& options() const { return options_; }

  /// Units are gathered one by one under Sharding::parameters; tok is none when it is the head too. What other stages hold is null.
  Unit<nn::VocabEmbedding> tok{nullptr};
  nn::Embedding pos{nullptr};
  nn::Norm tok_norm{nullptr}, norm{nullptr};
  std::vector<Unit<Block>> layers;
  Unit<nn::Linear> head{nullptr};  ///< null when tied

 private:
  void initialise();
  void check_whole(const char* what) const;
  /// `place` of a pass of `tokens` tokens, for the ones that this rank holds between the layers.
  nn::TokenPlace local_place(int64_t tokens, nn::TokenPlace place) const;

  model::ModelSpec spec_;
  TransformerOptions options_;
  nn::VocabPart vocab_;
  nn::Dropout embedding_dropout_;
  nn::RopeTable rope_;  ///< grows to the longest sequence seen
};
TORCH_MODULE(Transformer);

}  // namespace weft::models
