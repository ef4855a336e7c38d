#include "weft/nn/init.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <array>
#include <span>

#include "weft/core/error.h"
#include "weft/core/philox.h"

namespace weft::nn {
namespace {

constexpr int64_t kGrain = int64_t{1} << 14;  ///< elements below which a second thread does not pay

template <class T>
void fill_normal(uint64_t seed, uint64_t stream, double std, int64_t begin, T* out, int64_t n) {
  if constexpr (sizeof(T) >= sizeof(float)) {
    philox::fill_normal(std::span(out, static_cast<size_t>(n)), seed, stream, static_cast<uint64_t>(begin), 0.0, std);
  } else {
    std::array<float, 256> draws;
    for (int64_t done = 0; done < n; done += std::ssize(draws)) {
      const auto count = static_cast<size_t>(std::min<int64_t>(std::ssize(draws), n - done));
      philox::fill_normal(std::span(draws).first(count), seed, stream, static_cast<uint64_t>(begin + done), 0.0, std);
      std::copy_n(draws.begin(), count, out + done);
    }
  }
}

class RuleValues final : public StartValues {
 public:
  RuleValues(std::string name, const model::InitRule& rule, uint64_t seed) : name_(std::move(name)), rule_(rule), seed_(seed) {}
  void write(int64_t begin, at::Tensor part) const override { init_parameter(name_, rule_, seed_, begin, std::move(part)); }
  std::string describe() const override { return fmt::format("seed {}, rule {}, std {}", seed_, static_cast<int>(rule_.kind), rule_.std); }

 private:
  std::string name_;
  model::InitRule rule_;
  uint64_t seed_;
};

}  // namespace

std::shared_ptr<const StartValues> rule_values(std::string name, const model::InitRule& rule, uint64_t seed) {
  return std::make_shared<RuleValues>(std::move(name), rule, seed);
}

void init_parameter(std::string_view name, const model::InitRule& rule, uint64_t seed, int64_t begin, at::Tensor slice) {
  if (rule.kind == model::InitRule::Kind::zeros) return void(slice.zero_());
  if (rule.kind == model::InitRule::Kind::ones) return void(slice.fill_(1));
  if (!slice.is_contiguous()) throw InternalError(fmt::format("the slice of {} to initialise is not contiguous", name));
  const at::Tensor host = slice.is_cpu() ? slice : at::empty(slice.sizes(), slice.options().device(at::kCPU));
  const uint64_t stream = philox::stream_of(name);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, host.scalar_type(), "init_parameter", [&] {
    scalar_t* out = host.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, host.numel(), kGrain,
                     [&](int64_t from, int64_t to) { fill_normal(seed, stream, rule.std, begin + from, out + from, to - from); });
  });
  if (!slice.is_cpu()) slice.copy_(host);
}

}  // namespace weft::nn
