#include "weft/nn/init.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "weft/core/error.h"
#include "weft/nn/random.h"

namespace weft::nn {
namespace {

constexpr int64_t kPerBlock = 4;          ///< normals of one Philox block
constexpr int64_t kGrain = int64_t{1} << 14;  ///< elements below which a second thread does not pay

/// fp64 keeps the draw; fp32 rounds it; 16-bit types round the fp32 value, so that they equal a cast fp32 model.
template <class T>
T rounded(double value) {
  if constexpr (std::is_same_v<T, double>) return value;
  else return static_cast<T>(static_cast<float>(value));
}

template <class T>
void fill_normal(uint64_t key, double std, int64_t begin, T* out, int64_t n) {
  for (int64_t i = 0; i < n;) {
    const int64_t index = begin + i;
    const auto normals = to_normals(philox(key, static_cast<uint64_t>(index / kPerBlock), 0));
    for (int64_t lane = index % kPerBlock; lane < kPerBlock && i < n; ++lane, ++i)
      out[i] = rounded<T>(std * normals[static_cast<size_t>(lane)]);
  }
}

}  // namespace

void init_parameter(std::string_view name, const model::InitRule& rule, uint64_t seed, int64_t begin, at::Tensor slice) {
  if (rule.kind == model::InitRule::Kind::zeros) return void(slice.zero_());
  if (rule.kind == model::InitRule::Kind::ones) return void(slice.fill_(1));
  if (!slice.is_contiguous()) throw InternalError(fmt::format("the slice of {} to initialise is not contiguous", name));
  const at::Tensor host = slice.is_cpu() ? slice : at::empty(slice.sizes(), slice.options().device(at::kCPU));
  const uint64_t key = stream_key(seed, name);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, host.scalar_type(), "init_parameter", [&] {
    scalar_t* out = host.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, host.numel(), kGrain,
                     [&](int64_t from, int64_t to) { fill_normal(key, rule.std, begin + from, out + from, to - from); });
  });
  if (!slice.is_cpu()) slice.copy_(host);
}

}  // namespace weft::nn
