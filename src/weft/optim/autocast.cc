#include "weft/optim/autocast.h"

#include <ATen/autocast_mode.h>

namespace weft::optim {

Autocast::Autocast(at::ScalarType dtype, at::DeviceType device)
    : device_(device),
      outer_dtype_(at::autocast::get_autocast_dtype(device)),
      outer_enabled_(at::autocast::is_autocast_enabled(device)) {
  at::autocast::increment_nesting();
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_enabled(device_, true);
}

Autocast::~Autocast() {
  at::autocast::set_autocast_enabled(device_, outer_enabled_);
  at::autocast::set_autocast_dtype(device_, outer_dtype_);
  // Cast copies of weights are kept within the outermost scope only: the optimizer changes the weights between scopes.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace weft::optim
