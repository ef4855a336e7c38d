#include "weft/nn/dropout.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>
#include <vector>

#include "weft/core/philox.h"

namespace weft::nn {
namespace {

/// What a mask depends on. stream: the layer and the step.
struct Mask {
  double probability;
  uint64_t seed, stream;
  int64_t context;
  TokenPlace place;
};

template <class T>
void apply_to_row(const Mask& mask, int64_t first_index, const T* in, T* out, std::span<float> draws) {
  using Computed = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto keep_scale = static_cast<Computed>(1.0 / (1.0 - mask.probability));
  const auto probability = static_cast<float>(mask.probability);
  philox::fill_uniform(draws, mask.seed, mask.stream, static_cast<uint64_t>(first_index));
  for (size_t i = 0; i < draws.size(); ++i)
    out[i] = draws[i] < probability ? T(0) : static_cast<T>(static_cast<Computed>(in[i]) * keep_scale);
}

at::Tensor drop(const Mask& mask, const at::Tensor& input) {
  const at::Tensor x = input.contiguous();
  at::Tensor y = at::empty_like(x);
  if (x.is_meta()) return y;
  const int64_t tokens = x.size(1), width = x.size(2);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "dropout", [&] {
    const scalar_t* in = x.const_data_ptr<scalar_t>();
    scalar_t* out = y.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, x.size(0) * tokens, 1, [&](int64_t from, int64_t to) {
      std::vector<float> draws(static_cast<size_t>(width));
      for (int64_t row = from; row < to; ++row) {
        const int64_t sample = mask.place.first_sample + row / tokens * mask.place.sample_stride;
        const int64_t position = mask.place.first_position + row % tokens;
        apply_to_row(mask, (sample * mask.context + position) * width, in + row * width, out + row * width, draws);
      }
    });
  });
  return y;
}

/// backward applies the same mask to the gradient: it is drawn again, not kept.
class DropoutFunction : public torch::autograd::Function<DropoutFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const Mask& mask) {
    ctx->saved_data["probability"] = mask.probability;
    ctx->saved_data["numbers"] = std::vector<int64_t>{static_cast<int64_t>(mask.seed), static_cast<int64_t>(mask.stream),
                                                      mask.context, mask.place.step, mask.place.first_sample,
                                                      mask.place.sample_stride, mask.place.first_position};
    return drop(mask, x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    const std::vector<int64_t> n = ctx->saved_data["numbers"].toIntVector();
    const Mask mask{ctx->saved_data["probability"].toDouble(), static_cast<uint64_t>(n[0]),
                    static_cast<uint64_t>(n[1]), n[2], {n[3], n[4], n[5], n[6]}};
    return {apply(grads[0], mask), at::Tensor()};  // linear: its derivative is itself, in a second derivative too
  }
};

}  // namespace

Dropout::Dropout(double probability, uint64_t seed, std::string_view name, int64_t context)
    : probability_(probability), seed_(seed), name_(name), context_(context) {}

at::Tensor Dropout::operator()(const at::Tensor& x, const TokenPlace& place) const {
  if (probability_ == 0.0) return x;
  const uint64_t stream = philox::stream_of(fmt::format("dropout/{}/{}", name_, place.step));
  return DropoutFunction::apply(x, Mask{probability_, seed_, stream, context_, place});
}

}  // namespace weft::nn
