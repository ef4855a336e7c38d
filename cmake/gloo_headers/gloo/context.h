// Declarations that ProcessGroupGloo.hpp of libtorch names; gloo itself is inside libtorch_cpu and ships no headers.
// Objects of this class are only ever held by pointer and made by libtorch, so its data members do not matter here.
#pragma once

#include <chrono>

namespace gloo {

namespace transport {
class UnboundBuffer;
}

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};

}  // namespace gloo
