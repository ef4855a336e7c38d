#include <gtest/gtest.h>

#include <set>
#include <string>

#include "weft/core/error.h"
#include "weft/machine/machine.h"

namespace weft::machine {
namespace {

TEST(Devices, NamesOfPublishedRunsResolve) {
  const std::pair<const char*, const char*> names[] = {{"A100-SXM", "A100-80GB-SXM"},
                                                       {"A100-80GB-SXM", "A100-80GB-SXM"},
                                                       {"H100-96GB-HBM2e (SXM, 500W cap)", "H100-96GB-HBM2e"},
                                                       {"H100-80GB-SXM (700W)", "H100-80GB-SXM"},
                                                       {"H100-SXM", "H100-80GB-SXM"},
                                                       {"V100-32GB-SXM (DGX-2)", "V100-32GB-SXM2"},
                                                       {"V100-32GB", "V100-32GB-SXM2"},
                                                       {"TPU v6e-256", "TPU v6e"},
                                                       {"TPU v7 (Ironwood)", "TPU v7"},
                                                       {"GB200", "GB200"},
                                                       {"MI250X (GCD)", "MI250X (GCD)"},
                                                       {"h100", "H100-80GB-SXM"}};
  for (const auto& [asked, found] : names) EXPECT_EQ(find_device(asked).name, found) << asked;
}

TEST(Devices, UnknownNameIsAnErrorWithTheName) {
  try {
    find_device("H101-SXM");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("H101-SXM"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("H100-80GB-SXM"), std::string::npos);
  }
  EXPECT_THROW(find_device(""), ConfigError);
}

TEST(Devices, TableIsConsistent) {
  std::set<std::string> names;
  for (const Device& device : devices()) {
    EXPECT_TRUE(names.insert(device.name).second) << device.name;
    EXPECT_GT(device.memory_gib, 0) << device.name;
    EXPECT_GT(device.multiprocessors, 0) << device.name;
    EXPECT_GE(device.link_domain, 1) << device.name;
    EXPECT_LE(matmul_tflops(device, Precision::bf16), device.bf16_tflops) << device.name;
    EXPECT_GE(matmul_tflops(device, Precision::fp8), matmul_tflops(device, Precision::bf16)) << device.name;
    EXPECT_GT(std::string(device.source).size(), 10u) << device.name;
  }
}

TEST(Devices, PrecisionNames) {
  EXPECT_EQ(parse_precision("FP8"), Precision::fp8);
  EXPECT_EQ(parse_precision(""), Precision::bf16);
  EXPECT_THROW(parse_precision("int3"), ConfigError);
}

}  // namespace
}  // namespace weft::machine
