// Muon: momentum, orthogonalised, for the matrices of a model; AdamW for the rest.
#pragma once

#include <torch/arg.h>

#include "weft/optim/elementwise.h"
#include "weft/parallel/data_parallel.h"

namespace weft::optim {

struct MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;  ///< decoupled
  TORCH_ARG(bool, orthogonalise) = true;  ///< false: AdamW, with the three options below
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.95);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(int64_t, steps) = 5;  ///< of Newton and Schulz
  /// true: updates of a matrix [r, c] are multiplied by 0.2 sqrt(max(r, c)), the usual RMS of AdamW's, whose rate and decay then serve
  /// (Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4). false: by sqrt(max(1, r / c)) (Jordan et al. 2024).
  TORCH_ARG(bool, match_adamw) = true;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

/// The nearest matrix with orthonormal rows or columns, roughly: `steps` Newton-Schulz iterations with the coefficients (3.4445, -4.7750,
/// 2.0315) of Jordan et al. 2024 ("Muon: An optimizer for hidden layers"), after which singular values lie within 0.7 .. 1.2.
/// [r, c] -> [r, c], fp32 or fp64.
at::Tensor orthogonalise(const at::Tensor& matrix, int64_t steps);

/// Muon (Jordan et al. 2024). Momentum and masters are sharded as the weights are, element by element; for the orthogonalisation, which
/// needs whole matrices, each rank takes its share of them, the largest first: the update of as many matrices as there are ranks is
/// brought to one rank each, orthogonalised there, and taken back to where the weights are. So every matrix is worked on once, in the
/// same way for any number of ranks. Copies of 2 matrices per rank exist meanwhile.
/// A matrix that tensor-parallel ranks share out is gathered over them, and each of them orthogonalises the whole of it.
///
/// Groups keep the options that they come with. ConfigError for a parameter in a group to be orthogonalised that is no matrix.
class Muon : public torch::optim::Optimizer {
 public:
  /// replicas: ranks that hold the same whole parameters and share the work out (DataParallel::comm() under Sharding::none).
  /// Parameters that are shards know their ranks themselves.
  explicit Muon(const std::vector<OptimizerParamGroup>& groups, MuonOptions defaults = {}, Comm replicas = {});
  /// Collective.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Matrix;
  Matrix open(const at::Tensor& parameter, const MuonOptions& options);
  void update_elementwise(const at::Tensor& parameter, const MuonOptions& options);
  void update_round(const Comm& ranks, std::vector<Matrix>& round, bool backwards);
  NamedState& state_of(const at::Tensor& parameter);

  Comm replicas_;
};

/// Groups for Muon from dp.shards(): matrices that are not named by `others` (embeddings, head; core/pattern.h) are orthogonalised, the
/// rest gets AdamW, without decay for what is no matrix.
std::vector<OptimizerParamGroup> muon_groups(const DataParallel& dp, const MuonOptions& options, const std::string& others);

}  // namespace weft::optim
