#include "weft/parallel/pipeline/links.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "weft/core/error.h"

namespace weft::parallel {
namespace {

/// A header of fixed size: number of tensors, then dtype, requires_grad, number of dims and sizes of each.
constexpr int64_t kHeader = 128;

at::Tensor pack(const Shapes& shapes, int stage) {
  std::vector<int64_t> values{static_cast<int64_t>(shapes.size())};
  for (const TensorShape& shape : shapes) {
    values.insert(values.end(), {static_cast<int64_t>(shape.dtype), shape.requires_grad ? 1 : 0, static_cast<int64_t>(shape.sizes.size())});
    values.insert(values.end(), shape.sizes.begin(), shape.sizes.end());
  }
  if (std::ssize(values) > kHeader) {
    throw ConfigError(fmt::format("stage {} receives {} tensors, whose shapes take {} numbers; at most {} are sent. Hand over fewer tensors", stage,
                                  shapes.size(), values.size(), kHeader));
  }
  values.resize(kHeader);
  return at::tensor(values, at::kLong);
}

Shapes unpack(const at::Tensor& header) {
  const int64_t* next = header.const_data_ptr<int64_t>();
  Shapes shapes(static_cast<size_t>(*next++));
  for (TensorShape& shape : shapes) {
    shape.dtype = static_cast<at::ScalarType>(*next++);
    shape.requires_grad = *next++ != 0;
    const int64_t dims = *next++;
    shape.sizes.assign(next, next + dims);
    next += dims;
  }
  return shapes;
}

}  // namespace

Shapes shapes_of(const std::vector<at::Tensor>& tensors) {
  Shapes shapes;
  for (const at::Tensor& t : tensors) shapes.push_back({t.sizes().vec(), t.scalar_type(), t.requires_grad()});
  return shapes;
}

std::string to_text(const Shapes& shapes) {
  std::string text;
  for (const TensorShape& s : shapes) text += fmt::format("{}[{}] {}", text.empty() ? "" : ", ", fmt::join(s.sizes, ", "), c10::toString(s.dtype));
  return text;
}

std::vector<at::Tensor> Incoming::wait() {
  for (Work& w : work) w.wait();
  work.clear();
  return std::move(tensors);
}

void Links::begin(bool forward_only, bool learn) {
  forward_only_ = forward_only;
  learn_ = learn;
  if (learn) shapes_[forward_only].clear();
}

void Links::start(const at::Tensor& tensor, int to) { sent_.push_back(comm_.send(tensor.contiguous(), to)); }

void Links::send_activation(int stage, int micro_batch, const std::vector<at::Tensor>& outputs, int to) {
  const Shapes shapes = shapes_of(outputs);
  Shapes& expected = known(stage + 1, micro_batch);
  if (learn_) {
    expected = shapes;
    start(pack(shapes, stage + 1), to);
  } else if (shapes != expected) {
    throw ConfigError(fmt::format("hands over {}, and handed over {} when inputs had these shapes before. Shapes of activations may depend on shapes of the "
                                  "pipeline's inputs alone; pad them", to_text(shapes), to_text(expected)));
  }
  for (const at::Tensor& t : outputs) start(t.detach(), to);
}

Incoming Links::recv_activation(int stage, int micro_batch, int from) {
  Shapes& shapes = known(stage, micro_batch);
  if (learn_) {
    const at::Tensor header = at::empty({kHeader}, at::kLong);
    comm_.recv(header, from).wait();
    shapes = unpack(header);
  }
  Incoming incoming;
  for (const TensorShape& shape : shapes) {
    incoming.tensors.push_back(at::empty(shape.sizes, at::TensorOptions(shape.dtype).device(device_)));
    incoming.work.push_back(comm_.recv(incoming.tensors.back(), from));
  }
  for (size_t i = 0; i < shapes.size(); ++i) incoming.tensors[i].requires_grad_(shapes[i].requires_grad);
  return incoming;
}

void Links::send_grad(const std::vector<at::Tensor>& gradients, int to) {
  for (const at::Tensor& g : gradients) start(g.detach(), to);
}

Incoming Links::recv_grad(const Shapes& shapes, int from) {
  Incoming incoming;
  for (const TensorShape& shape : shapes) {
    if (!shape.requires_grad) continue;
    incoming.tensors.push_back(at::empty(shape.sizes, at::TensorOptions(shape.dtype).device(device_)));
    incoming.work.push_back(comm_.recv(incoming.tensors.back(), from));
  }
  return incoming;
}

void Links::progress() {
  while (!sent_.empty() && sent_.front().test()) sent_.pop_front();
}

void Links::finish() {
  for (Work& work : sent_) work.released();
  sent_.clear();
}

}  // namespace weft::parallel
