#include "weft/cost/offload.h"

#include <algorithm>

namespace weft::cost {

double offload_seconds(const OffloadBytes& bytes, const OffloadRates& rates) {
  return std::max({bytes.in / rates.in, bytes.update / rates.update, bytes.out / rates.out});
}

double exposed_offload_seconds(const OffloadBytes& bytes, const OffloadRates& rates) {
  return offload_seconds(bytes, rates) - bytes.update / rates.update;
}

}  // namespace weft::cost
