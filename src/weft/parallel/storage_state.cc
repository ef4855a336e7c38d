#include "weft/parallel/storage_state.h"

#include <c10/core/Allocator.h>

namespace weft::parallel {
namespace {

c10::StorageImpl& storage_of(const at::Tensor& flat) { return *flat.storage().unsafeGetStorageImpl(); }

}  // namespace

void forbid_access(const at::Tensor& flat, const std::string& message) {
  storage_of(flat).release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void allow_access(const at::Tensor& flat) { storage_of(flat).clear_data_ptr_access_error_msg_(); }

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
