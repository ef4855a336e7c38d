#include "weft/memory/kernel_scratch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/memory/account.h"
#include "weft/memory/allocation_probe.h"

namespace weft::memory {
namespace {

enum class Product { mm, addmm, addmm_, bmm, baddbmm, baddbmm_ };
constexpr std::array<std::pair<std::string_view, Product>, 6> kProducts{{{"aten::mm", Product::mm},
                                                                       {"aten::addmm", Product::addmm},
                                                                       {"aten::addmm_", Product::addmm_},
                                                                       {"aten::bmm", Product::bmm},
                                                                       {"aten::baddbmm", Product::baddbmm},
                                                                       {"aten::baddbmm_", Product::baddbmm_}}};

int64_t ask(Product product, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> in;
  for (const at::Tensor& input : inputs) in.push_back(untouched(input.sizes(), input.strides(), input.scalar_type()));
  const size_t first = product == Product::mm || product == Product::bmm ? 0 : 1;
  std::vector<int64_t> sizes = in[first].sizes().vec();
  sizes.back() = in[first + 1].sizes().back();
  const at::Tensor shape = at::empty(sizes, inputs[first].options());
  at::Tensor out = untouched(sizes, shape.strides(), shape.scalar_type());
  const at::NoGradGuard no_graph;
  return first_request([&] {
    switch (product) {
      case Product::mm: at::mm_out(out, in[0], in[1]); break;
      case Product::bmm: at::bmm_out(out, in[0], in[1]); break;
      case Product::addmm: at::addmm_out(out, in[0], in[1], in[2]); break;
      case Product::baddbmm: at::baddbmm_out(out, in[0], in[1], in[2]); break;
      case Product::addmm_: in[0].addmm_(in[1], in[2]); break;
      case Product::baddbmm_: in[0].baddbmm_(in[1], in[2]); break;
    }
  });
}

/// Machines without 16-bit matrix units compute products without scratch; there, asking would compute.
bool packs(at::ScalarType dtype) {
  constexpr int64_t kSize = 64;
  const at::Tensor square = at::empty({kSize, kSize}, at::TensorOptions(dtype).device(at::kMeta));
  return ask(Product::mm, {square, square}) > 0;
}

int64_t scratch_of(Product product, const std::vector<at::Tensor>& inputs) {
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, int64_t> known;
  static std::map<at::ScalarType, bool> packing;
  std::vector<int64_t> key{static_cast<int64_t>(product), static_cast<int64_t>(inputs[0].scalar_type()), at::get_num_threads()};
  for (const at::Tensor& t : inputs) {
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const at::ScalarType dtype = inputs[0].scalar_type();
  if (!packing.contains(dtype)) packing[dtype] = packs(dtype);
  if (!packing[dtype]) return 0;
  const auto [found, made] = known.try_emplace(std::move(key), 0);
  if (made) found->second = ask(product, inputs);
  return found->second;
}

int64_t scratch_of_product(Product product, c10::ArrayRef<const c10::IValue> arguments) {
  const size_t operands = product == Product::mm || product == Product::bmm ? 2 : 3;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < operands; ++i) {
    if (i >= arguments.size() || !arguments[i].isTensor()) return 0;
    const at::Tensor& t = arguments[i].toTensor();
    const bool narrow = t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
    if (!t.is_meta() || !narrow || t.numel() == 0) return 0;
    inputs.push_back(t);
  }
  return scratch_of(product, inputs);
}

constexpr std::array<std::string_view, 8> kElementwise{"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::mul", "aten::mul_", "aten::div", "aten::div_"};

/// Copies of operands in the common dtype, and of the result where that has another.
int64_t casts_of(std::string_view name, c10::ArrayRef<const c10::IValue> arguments) {
  if (arguments.size() < 2 || !arguments[0].isTensor() || !arguments[1].isTensor()) return 0;
  const at::Tensor &a = arguments[0].toTensor(), &b = arguments[1].toTensor();
  if (!a.is_meta() || !b.is_meta() || a.scalar_type() == b.scalar_type() || a.dim() == 0 || b.dim() == 0) return 0;
  const at::ScalarType common = at::result_type(a, b);
  const auto copy = [&](const at::Tensor& t) { return t.scalar_type() == common ? 0 : t.numel() * static_cast<int64_t>(c10::elementSize(common)); };
  return copy(a) + copy(b) + (name.back() == '_' ? copy(a) : 0);
}

struct Borrowed : at::ObserverContext {
  explicit Borrowed(int64_t count) : bytes(count) {}
  int64_t bytes;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
  const std::string_view name = fn.name();
  int64_t bytes = 0;
  for (const auto& [product_name, product] : kProducts)
    if (name == product_name) bytes = scratch_of_product(product, fn.inputs());
  if (std::find(kElementwise.begin(), kElementwise.end(), name) != kElementwise.end()) bytes = casts_of(name, fn.inputs());
  return bytes > 0 ? std::make_unique<Borrowed>(bytes) : nullptr;
}

/// At the end of the call its result exists, as it does when a real kernel asks for scratch.
void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  const int64_t bytes = static_cast<Borrowed*>(context)->bytes;
  const Category category = current_category();
  account(Space::meta).add(bytes, category);
  account(Space::meta).remove(bytes, category);
}

}  // namespace

KernelScratch::KernelScratch()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {}

KernelScratch::~KernelScratch() { at::removeCallback(handle_); }

}  // namespace weft::memory
