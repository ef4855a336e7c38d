#include "weft/nn/attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "weft/autograd/recompute.h"
#include "weft/layout/part.h"
#include "weft/nn/meta_shapes.h"

namespace weft::nn {
namespace {

/// Which of S keys each of the last T positions may see: [T, S], true = seen. window 0: all earlier ones.
at::Tensor seen_keys(int64_t queries, int64_t keys, int64_t window, const at::Device& device) {
  const at::Tensor all = at::ones({queries, keys}, at::TensorOptions(at::kBool).device(device));
  const at::Tensor causal = all.tril(keys - queries);
  return window > 0 ? causal.logical_and(all.triu(keys - queries - window + 1)) : causal;
}

/// The plain formula, for scores with a soft cap (Gemma 2). q [B, H, T, hd], k and v [B, Hkv, S, hd].
at::Tensor capped_attention(const at::Tensor& q, at::Tensor k, at::Tensor v, const model::AttentionSpec& spec, double scale) {
  const int64_t group = q.size(1) / k.size(1);
  if (group > 1) {
    k = k.repeat_interleave(group, 1);
    v = v.repeat_interleave(group, 1);
  }
  const at::Tensor scores = spec.softcap * at::tanh(at::matmul(q, k.transpose(2, 3)) * (scale / spec.softcap));
  const at::Tensor seen = seen_keys(q.size(2), k.size(2), spec.window, q.device());
  const at::Tensor masked = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  const auto type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::matmul(at::softmax(masked, -1, type).to(q.scalar_type()), v);
}

}  // namespace

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const model::AttentionSpec& spec,
                  Kernels kernels) {
  const int64_t tokens = q.size(1), keys = k.size(1);
  const double scale = spec.scale > 0 ? spec.scale : 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor qh = q.transpose(1, 2), kh = k.transpose(1, 2), vh = v.transpose(1, 2);  // [B, H, T, hd]
  const bool windowed = spec.window > 0 && spec.window < keys;
  const auto core = [=]() -> at::Tensor {
    if (spec.softcap > 0) return capped_attention(qh, kh, vh, spec, scale);
    const bool grouped = qh.size(1) != kh.size(1);
    const bool causal = tokens == keys && !windowed;
    const bool sees_all = tokens == 1 && !windowed;
    std::optional<at::Tensor> mask;
    if (!causal && !sees_all) mask = seen_keys(tokens, keys, windowed ? spec.window : 0, qh.device());
    if (qh.is_meta() && !mask) return attention_shapes(qh, kh, vh);
    return at::scaled_dot_product_attention(qh, kh, vh, mask, 0.0, causal, scale, grouped);
  };
  // Kernels that keep no scores have nothing to gain from Recompute::attention.
  const auto kind = spec.softcap > 0 ? autograd::Part::attention_scores : autograd::Part::attention;
  const at::Tensor y = autograd::part(kind, {qh, kh, vh}, core);
  return y.transpose(1, 2).reshape({q.size(0), tokens, -1});
}

AttentionImpl::AttentionImpl(const model::ModelSpec& spec, const model::AttentionSpec& attention, Kernels kernels,
                             const at::TensorOptions& options, const TensorAxis& tp)
    : spec_(attention), kernels_(kernels), tp_(tp) {
  const layout::HeadPart part = layout::head_part(attention, tp.size(), tp.rank());
  const int64_t q = part.queries.size * attention.head_dim, kv = part.keys.size * attention.head_dim;
  wq = register_module("wq", Linear(spec.hidden, q, attention.qkv_bias, options));
  wk = register_module("wk", Linear(spec.hidden, kv, attention.qkv_bias, options, tp.copies(part.copies)));
  wv = register_module("wv", Linear(spec.hidden, kv, attention.qkv_bias, options, tp.copies(part.copies)));
  wo = register_module("wo", RowLinear(q, spec.hidden, attention.out_bias, options, tp));
  if (!attention.qk_norm) return;
  // One weight for the heads of all ranks.
  q_norm = register_module("q_norm", Norm(attention.head_dim, spec.norm, false, spec.norm_eps, kernels, options, tp.comm()));
  k_norm = register_module("k_norm", Norm(attention.head_dim, spec.norm, false, spec.norm_eps, kernels, options, tp.comm()));
}

at::Tensor AttentionImpl::forward(const at::Tensor& input, const RopeTable& rope_rows, KeyValues* cache) {
  const std::vector<at::Tensor> y = column_products(tp_, input, {wq, wk, wv});
  const auto heads = [&](const at::Tensor& t) { return t.view({t.size(0), t.size(1), -1, spec_.head_dim}); };  // [B, T, heads, hd]
  at::Tensor q = heads(y[0]), k = heads(y[1]), v = heads(y[2]);
  if (q_norm) {
    q = q_norm(q);
    k = k_norm(k);
  }
  if (rope_rows.cos.defined()) std::tie(q, k) = rope(q, k, rope_rows, kernels_);
  if (cache != nullptr) {
    k = cache->keys = cache->keys.defined() ? at::cat({cache->keys, k}, 1) : k;
    v = cache->values = cache->values.defined() ? at::cat({cache->values, v}, 1) : v;
  }
  return wo(attend(q, k, v, spec_, kernels_));
}

}  // namespace weft::nn
