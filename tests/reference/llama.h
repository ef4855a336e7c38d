// A Llama-family model in plain libtorch, written without a line of Weft: what parity tests compare with.
#pragma once

#include <torch/nn/functional.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>

namespace weft::reference {

struct LlamaSizes {
  int64_t layers = 2, hidden = 32, heads = 4, kv_heads = 2, ffn = 88, vocab = 101, context = 16;
  bool tied = false;
  bool qkv_bias = false;
  bool qk_norm = false;
  double theta = 10000.0;
  double eps = 1e-5;
  int64_t head_dim = 0;  // 0: hidden / heads
};

struct RmsNormImpl : torch::nn::Module {
  RmsNormImpl(int64_t size, double eps) : eps(eps), weight(register_parameter("weight", torch::ones({size}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::rms_norm(x, weight.sizes(), weight, eps); }
  double eps;
  torch::Tensor weight;
};
TORCH_MODULE(RmsNorm);

struct LlamaAttentionImpl : torch::nn::Module {
  explicit LlamaAttentionImpl(const LlamaSizes& s)
      : head_dim(s.head_dim > 0 ? s.head_dim : s.hidden / s.heads), theta(s.theta), grouped(s.heads > s.kv_heads) {
    const auto linear = [](int64_t in, int64_t out, bool bias) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
    };
    wq = register_module("wq", linear(s.hidden, s.heads * head_dim, s.qkv_bias));
    wk = register_module("wk", linear(s.hidden, s.kv_heads * head_dim, s.qkv_bias));
    wv = register_module("wv", linear(s.hidden, s.kv_heads * head_dim, s.qkv_bias));
    wo = register_module("wo", linear(s.heads * head_dim, s.hidden, false));
    if (s.qk_norm) {
      q_norm = register_module("q_norm", RmsNorm(head_dim, s.eps));
      k_norm = register_module("k_norm", RmsNorm(head_dim, s.eps));
    }
  }

  torch::Tensor rotate(const torch::Tensor& x) {  // [B, H, T, hd]
    const auto type = x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
    const auto half = torch::arange(0, head_dim, 2, type);
    const auto angle = torch::outer(torch::arange(x.size(2), type), torch::pow(theta, -half / static_cast<double>(head_dim)));
    const auto cos = torch::cat({angle.cos(), angle.cos()}, 1), sin = torch::cat({angle.sin(), angle.sin()}, 1);
    const auto parts = x.chunk(2, -1);
    return (x * cos + torch::cat({-parts[1], parts[0]}, -1) * sin).to(x.scalar_type());
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto split = [&](torch::Tensor y) { return y.view({x.size(0), x.size(1), -1, head_dim}); };
    auto q = split(wq(x)), k = split(wk(x)), v = split(wv(x));
    if (q_norm) q = q_norm(q), k = k_norm(k);
    q = rotate(q.transpose(1, 2));
    k = rotate(k.transpose(1, 2));
    v = v.transpose(1, 2);
    const auto y = torch::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true, {}, /*enable_gqa=*/grouped);
    return wo(y.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
  }

  int64_t head_dim;
  double theta;
  bool grouped;
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  RmsNorm q_norm{nullptr}, k_norm{nullptr};
};
TORCH_MODULE(LlamaAttention);

struct LlamaFeedForwardImpl : torch::nn::Module {
  explicit LlamaFeedForwardImpl(const LlamaSizes& s) {
    w1 = register_module("w1", torch::nn::Linear(torch::nn::LinearOptions(s.hidden, s.ffn).bias(false)));
    w3 = register_module("w3", torch::nn::Linear(torch::nn::LinearOptions(s.hidden, s.ffn).bias(false)));
    w2 = register_module("w2", torch::nn::Linear(torch::nn::LinearOptions(s.ffn, s.hidden).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return w2(torch::silu(w1(x)) * w3(x)); }
  torch::nn::Linear w1{nullptr}, w3{nullptr}, w2{nullptr};
};
TORCH_MODULE(LlamaFeedForward);

struct LlamaBlockImpl : torch::nn::Module {
  explicit LlamaBlockImpl(const LlamaSizes& s) {
    norm1 = register_module("norm1", RmsNorm(s.hidden, s.eps));
    attn = register_module("attn", LlamaAttention(s));
    norm2 = register_module("norm2", RmsNorm(s.hidden, s.eps));
    ffn = register_module("ffn", LlamaFeedForward(s));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + attn(norm1(x));
    return x + ffn(norm2(x));
  }
  RmsNorm norm1{nullptr}, norm2{nullptr};
  LlamaAttention attn{nullptr};
  LlamaFeedForward ffn{nullptr};
};
TORCH_MODULE(LlamaBlock);

struct LlamaImpl : torch::nn::Module {
  explicit LlamaImpl(const LlamaSizes& s) {
    tok = register_module("tok", torch::nn::Embedding(s.vocab, s.hidden));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < s.layers; ++i) layers->push_back(LlamaBlock(s));
    norm = register_module("norm", RmsNorm(s.hidden, s.eps));
    if (!s.tied) head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(s.hidden, s.vocab).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {  // [B, T] -> [B, T, V]
    auto x = tok(tokens);
    for (auto& layer : *layers) x = layer->as<LlamaBlock>()->forward(x);
    x = norm(x);
    return head ? head(x) : torch::linear(x, tok->weight);
  }
  torch::nn::Embedding tok{nullptr};
  torch::nn::ModuleList layers{nullptr};
  RmsNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Llama);

/// Sum of token losses, logits widened to fp32 unless the model is fp64.
inline torch::Tensor loss_sum(const torch::Tensor& logits, const torch::Tensor& targets) {
  auto flat = logits.flatten(0, 1);
  if (flat.scalar_type() != torch::kDouble) flat = flat.to(torch::kFloat);
  return torch::nn::functional::cross_entropy(
      flat, targets.flatten(), torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

}  // namespace weft::reference
