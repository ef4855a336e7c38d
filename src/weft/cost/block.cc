#include "weft/cost/block.h"

#include <algorithm>
#include <cmath>

#include "weft/cost/widths.h"
#include "weft/layout/part.h"

namespace weft::cost {
namespace {

using machine::Software;

/// One linear layer on this rank. `cut`: which side tensor parallelism divides; the other side is whole on every rank and
/// travels between ranks, in fp8 where the products are.
enum class Cut { none, columns, rows };
struct Linear {
  double tokens, out, in;
  double batch = 1;
  Cut cut = Cut::none;
};

/// Casts to fp8 and the transposed copies that Hopper's products and block scaling need. What is gathered (the input of a layer
/// that is cut by columns, the output's gradient of one that is cut by rows) is cast before it travels and transposed after.
void add_casts(BlockWork& work, const Linear& linear, const Context& context) {
  constexpr double kReads[] = {2, 4, 2, 6};  // bytes per element: the cast's own pass of 2, and those that find scales
  const Software& software = *context.software;
  const double reads = kReads[static_cast<int>(software.scaling)];
  const double copies = context.generation == 9 || software.scaling == Software::Scaling::block ? 2 : 1;
  const double whole = linear.tokens * linear.batch, local = context.layout->sequence_parallel ? whole / context.tp.ranks : whole;
  const auto cast = [&](double width, bool gathered) {
    const bool travels = gathered && local < whole && software.low_precision_saved;
    return stream_time(travels ? local * width * (reads + 1) + whole * width * 2 * (copies - 1) : whole * width * (reads + copies), context.rates);
  };
  work.forward.memory += cast(linear.in, linear.cut == Cut::columns);
  work.input.memory += cast(linear.out, linear.cut == Cut::rows);
  work.forward.launches += 1;
  work.input.launches += 1;
}

/// Bytes per weight that a gradient product moves. fp32 accumulators are read and written in the product; a 16-bit gradient
/// beside an accumulator is written, then both are read and the sum is written; 16-bit sums are read and written.
constexpr double kAccumulationBytes[] = {8, 8, 4};

/// Adds the three products of a linear layer: y = x W^T, dx = dy W, dW = dy^T x.
void add_linear(BlockWork& work, const Linear& linear, const Context& context) {
  const bool low = context.low_precision;
  const auto [tokens, out, in, batch, cut] = linear;
  work.forward.gemm += gemm_time({tokens, out, in, batch}, context.rates, low);
  work.input.gemm += gemm_time({tokens, in, out, batch}, context.rates, low);
  if (!context.software->frozen_base) {
    work.weight.gemm += gemm_time({out, in, tokens, batch}, context.rates, low, kAccumulationBytes[static_cast<int>(context.software->gradients)]);
    work.weight.launches += 1;
  }
  work.forward.launches += 1;
  work.input.launches += 1;
  if (low) add_casts(work, linear, context);
}

void add_latent_projections(BlockWork& work, const model::AttentionSpec& attention, double hidden, const Context& context) {
  const model::LatentAttention& latent = *attention.latent;
  const double tp = context.tp.ranks, heads = layout::most_heads(attention, static_cast<int64_t>(tp)).queries, tokens = context.tokens;
  const double qk = static_cast<double>(latent.qk_nope_dim + latent.qk_rope_dim);
  if (latent.q_lora_rank > 0) {
    add_linear(work, {context.norm_tokens(), static_cast<double>(latent.q_lora_rank), hidden}, context);
    add_linear(work, {tokens, heads * qk, static_cast<double>(latent.q_lora_rank)}, context);
  } else {
    add_linear(work, {tokens, heads * qk, hidden}, context);
  }
  add_linear(work, {context.norm_tokens(), static_cast<double>(latent.kv_lora_rank + latent.qk_rope_dim), hidden}, context);
  add_linear(work, {tokens, heads * static_cast<double>(latent.qk_nope_dim + latent.v_dim), static_cast<double>(latent.kv_lora_rank)}, context);
  add_linear(work, {tokens, hidden, heads * static_cast<double>(latent.v_dim)}, context);
}

double head_size_share(double head_dim) {
  // Exponentials per FLOP grow as heads shrink; very wide heads leave few blocks in registers.
  if (head_dim <= 64) return 0.80;
  if (head_dim <= 96) return 0.90;
  return head_dim <= 192 ? 1.0 : 0.85;
}

void add_flash_attention(BlockWork& work, const model::AttentionSpec& attention, const Widths& widths, const Context& context) {
  const double tokens_seen = reach(attention, context.sequence, true) + 64;  // half a 128-wide diagonal tile is wasted
  const double flops = 2 * context.tokens * tokens_seen * (widths.q + widths.value);
  const double share = head_size_share(widths.head_dim) * (context.software->matched_attention ? 1.0 : context.tuning->older_attention);
  const double rate = context.rates.attention * share;
  work.forward.attention += flops / (rate * context.tuning->attention_forward) + context.rates.gap;
  work.input.attention += 2.5 * flops / (rate * context.tuning->attention_backward) + 2 * context.rates.gap;
  work.forward.launches += 1;
  work.input.launches += 3;
}

/// Megatron's fused softmax takes four matrices of scores per block of threads and declines other numbers of them.
bool fused_softmax_applies(double matrices) { return std::fmod(matrices, 4) == 0; }

/// Products whose rows are not whole 16-byte pieces bypass the matrix units (NVIDIA's guide to matrix multiplication, "tensor core
/// requirements"): the vector units have a sixteenth of their rate.
constexpr double kAlignedValues = 8, kVectorShare = 1.0 / 16;

/// Scores, softmax and dropout in memory: two batched products and passes over heads x s x s elements.
void add_unfused_attention(BlockWork& work, const Widths& widths, const Context& context) {
  const double s = context.sequence, sequences = context.tokens / s;
  const double batch = std::max(1.0, widths.heads * sequences);
  const Gemm scores{s, s, widths.head_dim, batch}, values{s, widths.head_dim, s, batch};
  Rates rates = context.rates;
  if (std::fmod(widths.head_dim, kAlignedValues) != 0) rates.matmul *= kVectorShare;
  work.forward.attention += gemm_time(scores, rates, false) + gemm_time(values, rates, false);
  work.input.attention += 2 * gemm_time(values, rates, false) + gemm_time(scores, rates, false) + gemm_time(values, rates, false);
  const double elements = batch * s * s;
  const double dropout = context.software->dropout ? 1 : 0;
  const bool eager = context.software->kernels == Software::Kernels::eager || !fused_softmax_applies(batch);
  // Forward: softmax reads and writes 2 bytes (eager: separate scale, mask and softmax), dropout 2 + 2 + mask.
  work.forward.attention += stream_time(elements * ((eager ? 14 : 4) + 5 * dropout), rates);
  work.input.attention += stream_time(elements * ((eager ? 16 : 6) + 5 * dropout), rates);
  // Heads are moved out of and back into the sequence layout.
  work.forward.memory += stream_time(8 * context.tokens * (widths.q + widths.kv), rates);
  work.input.memory += stream_time(8 * context.tokens * (widths.q + widths.kv), rates);
  work.forward.launches += eager ? 12 : 9;
  work.input.launches += eager ? 20 : 14;
}

void add_attention(BlockWork& work, const model::AttentionSpec& attention, double hidden, const Context& context) {
  const double tp = context.tp.ranks;
  const Widths widths = widths_of(attention, tp);
  const double core_forward = work.forward.attention;
  if (attention.latent) add_latent_projections(work, attention, hidden, context);
  else {
    add_linear(work, {context.tokens, widths.q + 2 * widths.kv, hidden, 1, Cut::columns}, context);
    add_linear(work, {context.tokens, hidden, widths.q, 1, Cut::rows}, context);
  }
  if (context.software->attention == Software::Attention::flash) add_flash_attention(work, attention, widths, context);
  else add_unfused_attention(work, widths, context);
  if (context.layout->recompute == layout::Recompute::attention) work.recompute.attention += work.forward.attention - core_forward;
  if (context.cp.ranks > 1) {
    // Keys and values visit every rank of the ring, hidden behind the attention of the chunk at hand, the first excepted.
    const double bytes = 2 * context.tokens * 2 * widths.kv * context.cp.ranks;
    const double forward = all_gather_time(bytes, context.cp), backward = 2 * forward;
    work.forward.cp += std::max(forward / context.cp.ranks, forward - work.forward.attention);
    work.input.cp += std::max(backward / context.cp.ranks, backward - work.input.attention);
  }
}

void add_mlp(BlockWork& work, double hidden, double ffn, const model::MlpSpec& mlp, const Context& context, double tokens, double batch) {
  add_linear(work, {tokens, mlp.gated ? 2 * ffn : ffn, hidden, batch, batch > 1 ? Cut::none : Cut::columns}, context);
  add_linear(work, {tokens, hidden, ffn, batch, batch > 1 ? Cut::none : Cut::rows}, context);
  const bool eager = context.software->kernels == Software::Kernels::eager;
  const double elements = tokens * batch * ffn;
  work.forward.memory += stream_time(elements * (mlp.gated ? (eager ? 10 : 6) : 4), context.rates);
  work.input.memory += stream_time(elements * (mlp.gated ? (eager ? 16 : 10) : 6), context.rates);
  work.forward.launches += eager ? 2 : 1;
  work.input.launches += eager ? 4 : 1;
}

void add_moe(BlockWork& work, const model::MoeSpec& moe, const model::MlpSpec& mlp, double hidden, const Context& context) {
  const layout::Layout& layout = *context.layout;
  const double experts = static_cast<double>(moe.experts) / static_cast<double>(layout.ep);
  // Rows that arrive at one rank: its share of all chosen (token, expert) pairs, times the imbalance of the fullest rank.
  const double rows = context.tokens / context.tp.ranks * static_cast<double>(moe.top_k) * static_cast<double>(layout.etp) * context.tuning->expert_imbalance;
  const double width = moe.latent_dim > 0 ? static_cast<double>(moe.latent_dim) : hidden;
  add_mlp(work, width, static_cast<double>(moe.expert_ffn) / static_cast<double>(layout.etp), mlp, context, rows / experts, experts);
  if (moe.latent_dim > 0) {
    add_linear(work, {context.norm_tokens(), width, hidden}, context);
    add_linear(work, {context.norm_tokens(), hidden, width}, context);
  }
  if (moe.shared_ffn > 0) add_mlp(work, hidden, static_cast<double>(moe.shared_ffn) / context.tp.ranks, mlp, context, context.tokens, 1);
  add_linear(work, {context.norm_tokens(), static_cast<double>(moe.experts), hidden}, context);
  // Permute and unpermute: rows are read and written before and after the experts, and weighted on the way back.
  work.forward.memory += stream_time(rows * width * 10, context.rates);
  work.input.memory += stream_time(rows * width * 12, context.rates);
  // Routing, permutation, dispatch with its counts read by the host, and per-expert bookkeeping are small kernels by the hundred.
  work.forward.memory += context.tuning->expert_launches * context.rates.gap;
  work.input.memory += 1.3 * context.tuning->expert_launches * context.rates.gap;
  work.forward.launches += context.tuning->expert_launches;
  work.input.launches += 1.3 * context.tuning->expert_launches;
  // A token crosses the network once for every node that holds one of its experts, and is copied there.
  const double domains = std::ceil(context.ep.domains()), k = static_cast<double>(moe.top_k);
  const double copies = domains > 1 ? domains * (1 - std::pow(1 - 1 / domains, k)) / k : 1;
  const double bytes = 2 * rows * width * copies, dispatch = bytes * (context.low_precision ? 0.75 : 1.0);
  const double exchange = (all_to_all_time(dispatch, context.ep) + all_to_all_time(bytes, context.ep)) / context.tuning->dispatch_share;
  if (context.ep.ranks <= 1) return;
  if (context.software->overlap_ep) {
    work.forward.ep += std::max(exchange - work.forward.device(), context.slowdown * exchange);
    work.input.ep += std::max(exchange - work.input.device() - work.weight.device(), context.slowdown * exchange);
  } else {
    work.forward.ep += exchange;
    work.input.ep += exchange;
  }
}

/// Norms, residual sums, dropout and rotary embedding.
void add_elementwise(BlockWork& work, const model::BlockSpec& block, double hidden, const Context& context) {
  const bool eager = context.software->kernels == Software::Kernels::eager;
  const double rows = context.norm_tokens(), norms = block.norms;
  // Eager RMSNorm is six kernels in fp32; eager LayerNorm one, between casts to and from fp32.
  const double norm_forward = eager ? (context.layer_norm ? 20 : 28) : 4, norm_backward = eager ? (context.layer_norm ? 28 : 40) : 7;
  work.forward.memory += norms * stream_time(rows * hidden * norm_forward, context.rates);
  work.input.memory += norms * stream_time(rows * hidden * norm_backward, context.rates);
  const double mask = context.software->dropout ? 1 : 0;
  work.forward.memory += 2 * stream_time(rows * hidden * (6 + mask), context.rates);
  work.input.memory += 2 * stream_time(rows * hidden * (6 + 5 * mask), context.rates);
  work.forward.launches += norms * (eager ? 6 : 1) + 2;
  work.input.launches += norms * (eager ? 10 : 2) + 4;
  if (context.layer_norm) return;
  const Widths widths = widths_of(block.attention, context.tp.ranks);
  const double rotated = context.tokens * (widths.q + widths.kv) * (eager ? 16 : 4);
  work.forward.memory += stream_time(rotated, context.rates);
  work.input.memory += stream_time(rotated, context.rates);
  work.forward.launches += eager ? 10 : 2;
  work.input.launches += eager ? 14 : 2;
}

/// Exposed part of communication that is split into pieces and overlapped with `compute`.
double exposed(double communication, double compute, const Context& context) {
  if (!context.software->overlap_tp) return communication;
  const double hidden = std::min(communication * context.tuning->tp_overlap_hidden, compute);
  return communication - hidden;
}

/// What communication costs that runs whole beside one product, which it slows down.
double beside(double communication, double product, const Context& context) {
  if (!context.software->overlap_tp_backward) return exposed(communication, product, context);
  const double hidden = std::min(communication, product);
  return communication - hidden + (context.software->overlap_tp ? context.slowdown : context.tuning->overlap_slowdown) * hidden;
}

/// Forward: a gather before and a reduction after each pair of layers (whole: one all-reduce). Backward the same the other way
/// round, but the reduction of the input's gradient needs only the first of a layer's two products and runs beside the other.
void add_tensor_parallel(BlockWork& work, double hidden, bool dense, const Context& context) {
  if (context.tp.ranks <= 1) return;
  const double bytes = 2 * context.tokens * hidden;
  const double pairs = dense ? 2 : 1;  // experts exchange tokens instead
  if (context.layout->sequence_parallel) {
    // Reductions sum in 16 bit; what is gathered feeds a product and travels in the product's type.
    const bool low = context.low_precision && context.software->low_precision_saved;
    const double gather = pairs * all_gather_time(low ? bytes / 2 : bytes, context.tp), reduce = pairs * all_gather_time(bytes, context.tp);
    work.forward.tp += exposed(gather + reduce, work.forward.gemm, context);
    work.input.tp += exposed(gather, work.input.gemm, context) + beside(reduce, 0.5 * work.weight.gemm, context);
    // Megatron gathers the input again for the weight gradient, beside the input gradient's product; PyTorch has kept it.
    if (context.software->overlap_tp_backward) work.input.tp += beside(gather, 0.5 * work.input.gemm, context);
  } else {
    const double reduce = pairs * all_reduce_time(bytes, context.tp);
    work.forward.tp += exposed(reduce, work.forward.gemm, context);
    work.input.tp += beside(reduce, 0.5 * work.weight.gemm, context);
  }
  work.forward.launches += 4;
  work.input.launches += 6;
}

void add_recompute(BlockWork& work, const Context& context) {
  switch (context.layout->recompute) {
    case layout::Recompute::full: work.recompute = work.forward; break;
    case layout::Recompute::half:
      // Attention and every second product are kept, elementwise kernels run again (see kept_bytes).
      work.recompute = work.forward;
      work.recompute.attention = 0;
      work.recompute.gemm *= 0.5;
      work.recompute.tp *= 0.5;
      break;
    default: break;
  }
}

}  // namespace

BlockWork block_work(const model::BlockSpec& block, double hidden, const Context& context) {
  BlockWork work;
  add_attention(work, block.attention, hidden, context);
  if (block.moe) add_moe(work, *block.moe, block.mlp, hidden, context);
  else if (block.mlp.ffn > 0) add_mlp(work, hidden, static_cast<double>(block.mlp.ffn) / context.tp.ranks, block.mlp, context, context.tokens, 1);
  add_elementwise(work, block, hidden, context);
  add_tensor_parallel(work, hidden, !block.moe, context);
  add_recompute(work, context);
  return work;
}

BlockWork head_work(double hidden, double vocab, const Context& context) {
  Context wide = context;
  wide.low_precision = false;  // the head stays in 16 bit
  BlockWork work;
  const double columns = vocab / context.tp.ranks;
  add_linear(work, {context.tokens, columns, hidden}, wide);
  // Fused: one pass forward, one in place backward. Otherwise an fp32 copy, maximum, exponential, sum, gradient, cast.
  const double elements = context.tokens * columns;
  const bool fused = context.software->loss == Software::Loss::in_place || context.software->loss == Software::Loss::compiled;
  work.forward.memory += stream_time(elements * (fused ? 4 : 14), context.rates);
  work.input.memory += stream_time(elements * (fused ? 4 : 14), context.rates);
  if (context.tp.ranks > 1) {
    work.forward.tp += 3 * all_reduce_time(4 * context.tokens, context.tp) + all_gather_time(2 * context.tokens * hidden, context.tp);
    work.input.tp += all_gather_time(2 * context.tokens * hidden, context.tp);
  }
  work.forward.launches += 10;
  work.input.launches += 10;
  return work;
}

BlockWork embedding_work(double hidden, double, const Context& context) {
  BlockWork work;
  work.forward.memory += stream_time(context.tokens * hidden * 8, context.rates);
  work.weight.memory += stream_time(context.tokens * hidden * 12, context.rates);
  if (context.tp.ranks > 1) work.forward.tp += all_reduce_time(2 * context.tokens * hidden, context.tp);
  work.forward.launches += 5;
  work.weight.launches += 5;
  return work;
}

}  // namespace weft::cost
