// Split<M>: a layer of the user's own module that weft::parallelize can cut. libtorch's C++ modules have no hooks, and
// torch::nn::LinearImpl::forward is not virtual; as with Unit, deriving from it is the hook.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>

#include "weft/nn/tensor_axis.h"
#include "weft/nn/weight_gradients.h"

namespace weft {

/// How tensor-parallel ranks share a module out; the names are PyTorch's (torch.distributed.tensor.parallel).
enum class TensorStyle {
  column,   ///< a Linear's outputs: each rank computes a part of them, from the same input
  row,      ///< a Linear's inputs, of which each rank has a part; an Embedding's rows. The result is the sum over the ranks
  sequence  ///< any module that works position by position on [B, T, ...]: ranks have parts of T, and its gradients are summed
};

namespace nn {

/// What parallelize() does to a Split.
class SplitBase {
 public:
  SplitBase() = default;
  /// A copy (clone()) is as whole as its tensors are: cutting it again would cut twice.
  SplitBase(const SplitBase&) = default;
  SplitBase& operator=(const SplitBase&) = default;
  virtual ~SplitBase() = default;

  /// Keeps this rank's part of the parameters (their identity stays). ConfigError, with the module's `name` and the legal sizes, when
  /// they cannot be cut so.
  virtual void cut(TensorStyle style, const TensorAxis& tp, const std::string& name) = 0;
  bool is_cut() const { return style_.has_value(); }

 protected:
  std::optional<TensorStyle> style_;
  TensorAxis tp_;
};

class SplitLinearImpl : public torch::nn::LinearImpl, public SplitBase, public SplitsBackward {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
  void cut(TensorStyle style, const TensorAxis& tp, const std::string& name) override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
};

class SplitEmbeddingImpl : public torch::nn::EmbeddingImpl, public SplitBase {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& tokens);
  void cut(TensorStyle style, const TensorAxis& tp, const std::string& name) override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  int64_t rows_ = 0, first_ = 0;  // of all ranks; this rank's first
};

template <class M>
struct SplitOf;
template <>
struct SplitOf<torch::nn::Linear> {
  using type = SplitLinearImpl;
};
template <>
struct SplitOf<torch::nn::Embedding> {
  using type = SplitEmbeddingImpl;
};

}  // namespace nn

/// A holder in place of torch::nn::Linear or torch::nn::Embedding: same arguments, same parameter names, and before parallelize() the
/// same layer. Split<torch::nn::Linear> wq{nullptr}; ... wq = register_module("wq", Split<torch::nn::Linear>(in, out)).
template <class M>
class Split : public torch::nn::ModuleHolder<typename nn::SplitOf<M>::type> {
 public:
  using Impl = typename nn::SplitOf<M>::type;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
};

}  // namespace weft
