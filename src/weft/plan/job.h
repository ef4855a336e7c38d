// Job: everything that one estimate depends on.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/layout/layout.h"
#include "weft/machine/machine.h"
#include "weft/model/spec.h"

namespace weft::plan {

/// A model prepared for many estimates: equal blocks are counted once.
struct ModelSummary {
  struct Kind {
    model::BlockSpec block;
    int64_t count = 0;
    double dense_parameters = 0;   ///< of one block, divided by tp
    double expert_parameters = 0;  ///< of one block, divided by ep * etp
    double replicated = 0;         ///< norms and routers of one block
  };
  std::vector<Kind> kinds;
  std::vector<int> kind_of_layer;
  double hidden = 0;
  double vocab = 0;               ///< as padded by the framework is up to the caller
  double embedding_parameters = 0;
  double head_parameters = 0;     ///< the tied copy included when the model is tied
  bool tied = false;
  bool layer_norm = false;
  double total_parameters = 0;
  double mtp_layers = 0;
  double training_flops_causal = 0;  ///< per token
  double training_flops_full = 0;

  static ModelSummary of(const model::ModelSpec& spec, int64_t sequence);
};

struct Job {
  ModelSummary model;
  machine::Machine machine;
  machine::Software software;
  layout::Layout layout;
  machine::Precision precision = machine::Precision::bf16;
  int64_t sequence = 0;
};

}  // namespace weft::plan
