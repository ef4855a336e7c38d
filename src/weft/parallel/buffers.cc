#include "weft/parallel/buffers.h"

#include <ATen/core/grad_mode.h>

namespace weft::parallel {

void broadcast_tensor(const at::Tensor& tensor, const Comm& comm) {
  const at::NoGradGuard no_grad;
  at::Tensor data = tensor.detach().contiguous();
  comm.broadcast(data, 0).released();
  if (!data.is_alias_of(tensor)) tensor.detach().copy_(data);
}

void synchronise_buffers(const std::vector<NamedTensor>& buffers, BufferPolicy policy, const Comm& comm) {
  if (policy == BufferPolicy::local) return;
  const at::NoGradGuard no_grad;
  for (const NamedTensor& b : buffers) {
    if (policy == BufferPolicy::average && b.tensor.is_floating_point()) {
      at::Tensor data = b.tensor.detach().contiguous();
      comm.all_reduce(data, ReduceOp::avg).released();
      if (!data.is_alias_of(b.tensor)) b.tensor.detach().copy_(data);
    } else {
      broadcast_tensor(b.tensor, comm);
    }
  }
}

}  // namespace weft::parallel
