#include "weft/nn/meta_shapes.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace weft::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Blocks of queries and keys that a thread works on (libtorch 2.11 to 2.15, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
int64_t query_block(int64_t tokens) {
  const int64_t block = tokens >= 768 ? 256 : tokens >= 192 ? 64 : 32;
  return std::min(block, tokens);
}
int64_t key_block(int64_t keys) { return std::min<int64_t>(512, keys); }

at::TensorOptions accumulating(const at::Tensor& t) {
  return t.options().dtype(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).requires_grad(false);
}

/// Scratch of all threads while a kernel runs: `elements` of the accumulating dtype for each, and `reduced` of a 16-bit one.
void allocate_scratch(const at::Tensor& q, int64_t elements, int64_t reduced) {
  const int64_t threads = at::get_num_threads();
  const at::Tensor wide = at::empty({threads, elements}, accumulating(q));
  const bool narrow = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  const at::Tensor low = at::empty({threads, narrow ? reduced : 0}, q.options().requires_grad(false));
}

at::Tensor heads_inside(const at::Tensor& like) {  // [B, H, T, hd] over memory [B, T, H, hd]
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options().requires_grad(false)).transpose(1, 2);
}

class AttentionShapes : public torch::autograd::Function<AttentionShapes> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const int64_t queries = query_block(q.size(2)), keys = key_block(k.size(2));
    const at::Tensor out = heads_inside(q);
    const at::Tensor log_sum = at::empty({q.size(0), q.size(2), q.size(1)}, accumulating(q));
    allocate_scratch(q, queries * (keys + 2 + q.size(3)), queries * keys);
    ctx->save_for_backward({q, k, v, out, log_sum});
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    variable_list gradients{heads_inside(q), heads_inside(k), heads_inside(v)};
    const int64_t queries = query_block(q.size(2)), keys = key_block(k.size(2));
    allocate_scratch(q, 2 * queries * keys + queries, 2 * queries * keys);  // scores, their gradients, a sum of each row
    return gradients;
  }
};

class EmbeddingShapes : public torch::autograd::Function<EmbeddingShapes> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& tokens) {
    ctx->saved_data["weight"] = weight.detach();
    ctx->saved_data["tokens"] = tokens;
    std::vector<int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(weight.size(1));
    return at::empty(sizes, weight.options().requires_grad(false));
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    return {at::empty_like(ctx->saved_data["weight"].toTensor()), at::Tensor()};
  }
};

class LayerNormShapes : public torch::autograd::Function<LayerNormShapes> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
    const at::Tensor x = input.contiguous(), y = at::empty_like(x);
    const int64_t rows = x.numel() / weight.numel();
    const at::Tensor mean = at::empty({rows}, x.options().requires_grad(false)), rstd = at::empty_like(mean);
    ctx->save_for_backward({x, weight, bias, mean, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    const variable_list saved = ctx->get_saved_variables();
    variable_list gradients;
    for (size_t i = 0; i < 3; ++i) gradients.push_back(saved[i].defined() ? at::empty_like(saved[i]) : at::Tensor());
    const at::Tensor scratch = at::empty({2, at::get_num_threads(), saved[1].numel()}, saved[1].options().requires_grad(false));
    return gradients;
  }
};

}  // namespace

at::Tensor layer_norm_shapes(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return LayerNormShapes::apply(x, weight, bias);
}

at::Tensor embedding_shapes(const at::Tensor& weight, const at::Tensor& tokens) { return EmbeddingShapes::apply(weight, tokens); }

at::Tensor attention_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) { return AttentionShapes::apply(q, k, v); }

}  // namespace weft::nn
