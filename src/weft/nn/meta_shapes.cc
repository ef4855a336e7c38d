#include "weft/nn/meta_shapes.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "weft/memory/allocation_probe.h"

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

bool is_narrow(const at::Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

/// Scratch of all threads while a kernel runs: `elements` of the accumulating dtype for each, and `reduced` of a 16-bit one; and
/// `more` bytes.
void allocate_scratch(const at::Tensor& q, int64_t elements, int64_t reduced, int64_t more) {
  const int64_t threads = at::get_num_threads();
  const at::Tensor wide = at::empty({threads, elements}, accumulating(q));
  const at::Tensor low = at::empty({threads, is_narrow(q) ? reduced : 0}, q.options().requires_grad(false));
  const at::Tensor rest = at::empty({more}, q.options().dtype(at::kByte).requires_grad(false));
}

int64_t even(int64_t count) { return count + count % 2; }

/// Keys and values as the matrix units of the processor want them, when the kernel makes such copies, with what each thread needs
/// for them (same source, of 2.15).
int64_t packed_bytes(const at::Tensor& q, const at::Tensor& k) {
  constexpr int64_t kFewest = 64;  // tokens
  constexpr double kGain = 4;      // products per packed element and thread
  if (!is_narrow(q) || !at::native::cpublas::could_pack(q.scalar_type()) || std::min(q.size(2), k.size(2)) < kFewest) return 0;
  const int64_t threads = at::get_num_threads(), heads = q.size(0) * q.size(1), block = query_block(q.size(2)), keys = key_block(k.size(2));
  const int64_t blocks = (q.size(2) + block - 1) / block, last = (k.size(2) - 1) % keys + 1;
  const auto work = static_cast<double>((heads * blocks + threads - 1) / threads * block * std::min(q.size(2), k.size(2)));
  if (work / static_cast<double>(heads * k.size(2)) < kGain) return 0;
  const int64_t rows = (k.size(2) - 1) / keys * even(keys) + even(last);
  const int64_t width = q.size(3), padded = width % 2 == 0 ? 0 : block * even(width), odd_keys = block * (keys % 2);
  return q.element_size() * (heads * (even(width) * k.size(2) + rows * width) + threads * (keys * width + padded + odd_keys));
}

/// Elements that a thread of the backward kernel keeps: scores and their gradients, and a sum of each row.
int64_t backward_elements(int64_t queries, int64_t keys) { return 2 * queries * keys + queries; }

/// Bytes that oneDNN borrows for the small products inside the backward kernel in 16 bit, found out by running it for one head on few
/// tokens: blocks, their strides and what is left of the last one are those of the real call.
int64_t borrowed_by_backward(const at::Tensor& q, const at::Tensor& k) {
  if (!is_narrow(q)) return 0;
  const auto few = [](int64_t tokens) { return tokens <= 1536 ? tokens : 1024 + tokens % 512; };
  const int64_t heads = q.size(0) * q.size(1), threads = at::get_num_threads(), width = q.size(3), queries = few(q.size(2)), keys = few(k.size(2));
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, int64_t> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const bool inside = heads > 1;  // the kernel's threads work on heads; with one, they are the product's
  const auto [found, made] = known.try_emplace({queries, keys, width, q.stride(2), k.stride(2), inside ? 1 : threads, static_cast<int64_t>(q.scalar_type())}, 0);
  if (made) {
    const at::NoGradGuard no_graph;
    if (inside) at::set_num_threads(1);
    const auto head = [&](const at::Tensor& t, int64_t tokens) {
      return memory::untouched({1, 1, tokens, width}, {tokens * t.stride(2), width, t.stride(2), 1}, q.scalar_type());
    };
    const at::Tensor one_q = head(q, queries), one_k = head(k, keys), one_v = head(k, keys);
    const auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(one_q, one_k, one_v, 0.0, true);
    const memory::RequestCounter counter;
    at::_scaled_dot_product_flash_attention_for_cpu_backward(out, one_q, one_k, one_v, out, log_sum, 0.0, true);
    const int64_t peak = counter.now().peak;
    const int64_t q_rows = query_block(queries), k_rows = key_block(keys), element = q.element_size();
    const int64_t own = at::get_num_threads() * (backward_elements(q_rows, k_rows) * 4 + 2 * q_rows * k_rows * element);
    found->second = std::max<int64_t>(0, peak - own - (queries + 2 * keys) * width * element);
    if (inside) at::set_num_threads(static_cast<int>(threads));
  }
  return found->second * std::min(threads, heads);
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
    allocate_scratch(q, queries * (keys + 2 + q.size(3)), queries * keys, packed_bytes(q, k));
    ctx->save_for_backward({q, k, v, out, log_sum});
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    variable_list gradients{heads_inside(q), heads_inside(k), heads_inside(v)};
    const int64_t queries = query_block(q.size(2)), keys = key_block(k.size(2));
    allocate_scratch(q, backward_elements(queries, keys), 2 * queries * keys, borrowed_by_backward(q, k));
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
