#include "weft/parallel/storage_state.h"

#include <c10/core/Allocator.h>
#include <torch/headeronly/version.h>

namespace weft::parallel {
namespace {

c10::StorageImpl& storage_of(const at::Tensor& flat) { return *flat.storage().unsafeGetStorageImpl(); }

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
// Before 2.15 libtorch has no call that ends its check of accesses, only these private flags. An explicit instantiation may name them.
void clear_access_error(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*thrown, bool c10::StorageImpl::*checked>
struct AccessFlags {
  friend void clear_access_error(c10::StorageImpl& storage) { storage.*thrown = storage.*checked = false; }
};
template struct AccessFlags<&c10::StorageImpl::throw_on_immutable_data_ptr_, &c10::StorageImpl::has_mutable_data_ptr_check_>;
#else
void clear_access_error(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#endif

}  // namespace

void forbid_access(const at::Tensor& flat, const std::string& message) {
  storage_of(flat).release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void allow_access(const at::Tensor& flat) { clear_access_error(storage_of(flat)); }

void release_data(const at::Tensor& flat, const std::string& message) {
  storage_of(flat).set_data_ptr_noswap(c10::DataPtr(nullptr, flat.device()));
  forbid_access(flat, message);
}

void restore_data(const at::Tensor& flat) {
  c10::StorageImpl& storage = storage_of(flat);
  allow_access(flat);
  storage.set_data_ptr_noswap(storage.allocator()->allocate(storage.nbytes()));
}

}  // namespace weft::parallel
