// Declarations that ProcessGroupGloo.hpp of libtorch names; gloo itself is inside libtorch_cpu and ships no headers.
#pragma once
