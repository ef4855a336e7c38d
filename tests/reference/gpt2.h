// GPT-2 in plain libtorch, written without a line of Weft: what parity tests compare with.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

namespace weft::reference {

struct Gpt2Sizes {
  int64_t layers = 2, hidden = 32, heads = 4, vocab = 101, context = 16;
  double eps = 1e-5;
};

struct Gpt2AttentionImpl : torch::nn::Module {
  explicit Gpt2AttentionImpl(const Gpt2Sizes& s) : heads(s.heads) {
    for (auto [name, linear] : {std::pair{"wq", &wq}, {"wk", &wk}, {"wv", &wv}, {"wo", &wo}})
      *linear = register_module(name, torch::nn::Linear(s.hidden, s.hidden));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto split = [&](torch::Tensor y) { return y.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2); };
    const auto q = split(wq(x)), k = split(wk(x)), v = split(wv(x));
    const auto y = torch::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    return wo(y.transpose(1, 2).reshape(x.sizes()));
  }
  int64_t heads;
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TORCH_MODULE(Gpt2Attention);

struct Gpt2FeedForwardImpl : torch::nn::Module {
  explicit Gpt2FeedForwardImpl(const Gpt2Sizes& s) {
    w1 = register_module("w1", torch::nn::Linear(s.hidden, 4 * s.hidden));
    w2 = register_module("w2", torch::nn::Linear(4 * s.hidden, s.hidden));
  }
  torch::Tensor forward(const torch::Tensor& x) { return w2(torch::gelu(w1(x), "tanh")); }
  torch::nn::Linear w1{nullptr}, w2{nullptr};
};
TORCH_MODULE(Gpt2FeedForward);

struct Gpt2BlockImpl : torch::nn::Module {
  explicit Gpt2BlockImpl(const Gpt2Sizes& s) {
    const auto options = torch::nn::LayerNormOptions({s.hidden}).eps(s.eps);
    norm1 = register_module("norm1", torch::nn::LayerNorm(options));
    attn = register_module("attn", Gpt2Attention(s));
    norm2 = register_module("norm2", torch::nn::LayerNorm(options));
    ffn = register_module("ffn", Gpt2FeedForward(s));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + attn(norm1(x));
    return x + ffn(norm2(x));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Gpt2Attention attn{nullptr};
  Gpt2FeedForward ffn{nullptr};
};
TORCH_MODULE(Gpt2Block);

/// Tied head, learned positions, biases everywhere but in the head.
struct Gpt2Impl : torch::nn::Module {
  explicit Gpt2Impl(const Gpt2Sizes& s) {
    tok = register_module("tok", torch::nn::Embedding(s.vocab, s.hidden));
    pos = register_module("pos", torch::nn::Embedding(s.context, s.hidden));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < s.layers; ++i) layers->push_back(Gpt2Block(s));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({s.hidden}).eps(s.eps)));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {  // [B, T] -> [B, T, V]
    auto x = tok(tokens) + pos(torch::arange(tokens.size(1)));
    for (auto& layer : *layers) x = layer->as<Gpt2Block>()->forward(x);
    return torch::linear(norm(x), tok->weight);
  }
  torch::nn::Embedding tok{nullptr}, pos{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt2);

}  // namespace weft::reference
