#include <torch/csrc/jit/api/module.h>

#include "weft/parallel/data_parallel.h"

namespace weft {
namespace {

template <class List>
std::vector<NamedTensor> named(const List& tensors) {
  std::vector<NamedTensor> list;
  for (const auto& item : tensors) list.push_back({item.name, item.value});
  return list;
}

}  // namespace

DataParallel::DataParallel(const torch::jit::Module& module, Comm comm, DataParallelOptions options)
    : DataParallel(named(module.named_parameters()), named(module.named_buffers()), std::move(comm), std::move(options)) {}

}  // namespace weft
