// Products of tensor-parallel layers that run while their operands or results are on their way between the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "weft/comm/comm.h"

/// A product and the exchange before or after it are cut into pieces, and a piece travels while its neighbour is computed (Wang et al. 2023,
/// "Overlap communication with dependent computation via decomposition"; Megatron-LM's tp_comm_overlap, PyTorch's async TP).
/// Gradients of weights are one product over all rows, which in backward runs beside the last pieces, so that they do not depend on the
/// number of pieces; the same bytes travel as without.
///
/// Pieces are samples where there are as many, else positions. Tensors are [B, T, D]. All ranks call it alike, forward and backward.
/// Gradients of gradients are refused (ConfigError).
namespace weft::autograd {

struct PieceExchange {
  Comm comm;
  bool sequence = false;  ///< ranks hold neighbouring parts of T outside of the layers
  int64_t pieces = 1;
};

/// y_i = X weights[i]^T + biases[i], where X is x, the same on all ranks, or with `sequence` the gathered parts: [B, T / size, D] -> [B, T, out_i].
/// biases: as many, undefined for none. Backward as copy_to, or all_gather (total): the sum of the ranks' X gradients, or this rank's part.
std::vector<at::Tensor> products_behind_entry(const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases,
                                              const PieceExchange& exchange);

/// The sum over the ranks of x weight^T, x [B, T, in of this rank] -> [B, T, out], or with `sequence` this rank's part [B, T / size, out].
/// Backward as reduce_from, or reduce_scatter (total).
at::Tensor product_before_exit(const at::Tensor& x, const at::Tensor& weight, const PieceExchange& exchange);

}  // namespace weft::autograd
