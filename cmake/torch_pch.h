// Precompiled for all library targets that use torch. Headers that nearly every such file needs, and no others:
// c10d stays inside comm/, <torch/torch.h> inside tests and examples.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>
