// Time of one transformer block, and of embedding and head, on one rank for one micro-batch.
#pragma once

#include "weft/cost/collective.h"
#include "weft/cost/gemm.h"
#include "weft/layout/layout.h"
#include "weft/model/spec.h"

namespace weft::cost {

/// Seconds by kind of work; `launches` counts kernels that the host starts.
struct Work {
  double gemm = 0;
  double attention = 0;
  double memory = 0;     ///< memory-bound kernels
  double tp = 0;         ///< exposed tensor-parallel communication
  double cp = 0;         ///< exposed context-parallel communication
  double ep = 0;         ///< exposed expert-parallel communication
  double launches = 0;

  double device() const { return gemm + attention + memory; }
  double total() const { return device() + tp + cp + ep; }
  Work& operator+=(const Work& other);
};
Work operator*(double factor, Work work);

/// A block's work by part of the step. B = input + weight.
struct BlockWork {
  Work forward;
  Work input;      ///< gradient of activations (I)
  Work weight;     ///< gradient of weights (W)
  Work recompute;  ///< repeated forward work, done before I

  double total() const { return forward.total() + input.total() + weight.total() + recompute.total(); }
};

/// What the block times depend on besides the block itself. Tokens are those of one rank and micro-batch.
struct Context {
  const layout::Layout* layout = nullptr;
  const machine::Software* software = nullptr;
  const Tuning* tuning = nullptr;
  Rates rates;
  Group tp, cp, ep;
  double sequence = 0;
  double tokens = 0;       ///< sequence * micro-batch / cp
  double slowdown = 0;     ///< compute lost per second of a collective that overlaps it
  bool low_precision = false;
  bool layer_norm = false;
  int generation = 9;

  static Context of(const layout::Layout& layout, const machine::Machine& machine, const machine::Software& software, const Tuning& tuning, double sequence,
                    machine::Precision precision, bool layer_norm);
  /// Tokens of the regions outside tensor parallelism: divided by tp under sequence parallelism.
  double norm_tokens() const;
};

BlockWork block_work(const model::BlockSpec& block, double hidden, const Context& context);

/// Final norm, head and loss. Weight part included in `weight`.
BlockWork head_work(double hidden, double vocab, const Context& context);
BlockWork embedding_work(double hidden, double vocab, const Context& context);

/// FLOPs of the model for one token, forward: products with weights, and attention over `sequence` tokens.
double block_linear_flops(const model::BlockSpec& block, double hidden);
double block_attention_flops(const model::BlockSpec& block, double sequence, bool causal);
/// Training FLOPs of one token: 3 x (blocks + head). Full attention counts s per token, causal s / 2.
double training_flops(const model::ModelSpec& spec, double sequence, bool causal);

}  // namespace weft::cost
