#include "weft/nn/start_values.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace weft::nn {
namespace {

struct Attached : c10::BackendMeta {
  explicit Attached(std::shared_ptr<const StartValues> v) : values(std::move(v)) {}
  std::shared_ptr<const StartValues> values;
};

}  // namespace

void set_start_values(const at::Tensor& meta, std::shared_ptr<const StartValues> values) {
  meta.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Attached>(std::move(values)));
}

std::shared_ptr<const StartValues> start_values(const at::Tensor& tensor) {
  if (!tensor.is_meta()) return nullptr;
  const auto* attached = dynamic_cast<const Attached*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return attached == nullptr ? nullptr : attached->values;
}

void move_to_memory(const at::Tensor& tensor, const at::Tensor& home) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(home.getIntrusivePtr());
  tensor.unsafeGetTensorImpl()->set_backend_meta(nullptr);
}

void materialise(const at::Tensor& tensor) {
  const auto values = start_values(tensor);
  if (!values) return;
  const at::NoGradGuard no_grad;
  const at::Tensor home = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
  values->write(0, home.view({-1}));
  move_to_memory(tensor, home);
}

}  // namespace weft::nn
