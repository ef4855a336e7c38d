// Precompiled for all tests that use torch; tests may include all of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
