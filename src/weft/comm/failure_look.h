// How soon a failure on one rank is known on the others.
#pragma once

#include <chrono>

namespace weft::detail {

/// A rank looks at least this often whether the world has failed: on `local` while it is inside a call (besides, abort() wakes
/// those that sleep), on gloo always, in a thread of its own. So World::abort, guard() and the death of a rank reach a rank that
/// is inside a call within this time, one exchange with the store and whatever the machine takes to run its thread.
inline constexpr std::chrono::milliseconds kFailureLook{200};

}  // namespace weft::detail
