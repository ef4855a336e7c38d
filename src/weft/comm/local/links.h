// Links: how the ranks of a world hand over segments and see each other end. Not used by calls that move data.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "weft/comm/local/segment.h"
#include "weft/comm/local/types.h"

namespace weft::local {

/// A segment on its way to a peer, under a name that both sides derive from what they do.
struct Parcel {
  std::string key;
  std::string error;                  ///< not empty: there is no segment, and why
  uint64_t bytes = 0;                 ///< what the sender was asked for
  uint64_t number = 0;                ///< number of a shared block
  std::shared_ptr<Segment> segment;
};

class Links {
 public:
  virtual ~Links() = default;
  /// False when the peer does not take more at the moment. A peer that is gone swallows everything.
  virtual bool send(int peer, const Parcel& parcel) = 0;
  /// The next parcel from this peer if one comes within `patience`.
  virtual bool receive(int peer, std::chrono::milliseconds patience, Parcel& parcel) = 0;
  /// Whether every rank has a mapping of its own of what was handed over.
  virtual bool separate_mappings() const = 0;
  /// Peers whose process ended or closed its side.
  virtual RankSet closed() = 0;
};

/// Ranks are threads: parcels are passed by reference, all share one mapping, nobody ever closes.
std::vector<std::unique_ptr<Links>> thread_links(int size);

/// Ranks are processes of one user: one Unix socket (abstract, so without a file) per pair, open until the end.
/// CommError naming the ranks that did not come in time; ConfigError when they disagree on the size.
std::unique_ptr<Links> socket_links(const std::string& key, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace weft::local
