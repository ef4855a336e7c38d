#include "weft/machine/device.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "weft/core/error.h"

namespace weft::machine {
namespace {

constexpr const char* kMlEngineering = "data sheet; matmul rates from stas00/ml-engineering compute/accelerator (744d01e)";
constexpr const char* kMlPerf = "MLPerf Training v5 system descriptions; matmul rates from stas00/ml-engineering (744d01e)";

// name, GiB, TB/s, bf16, fp8, fp4, link, NIC Gb/s, host, matmul bf16, matmul fp8, L2 MB, SMs, node, domain, generation, source
const std::vector<Device> kDevices = {
    {"V100-16GB-SXM2", 16, 0.9, 125, 0, 0, 150, 50, 15.75, 0, 0, 6, 80, 8, 8, 7, "V100 data sheet (fp16 tensor rate)"},
    {"V100-32GB-SXM2", 32, 0.9, 125, 0, 0, 150, 50, 15.75, 0, 0, 6, 80, 8, 8, 7, "V100 data sheet (fp16 tensor rate); DGX-2 has 16 in one domain"},
    {"A100-40GB-SXM", 40, 1.555, 312, 0, 0, 300, 200, 31, 271.2, 0, 40, 108, 8, 8, 8, kMlEngineering},
    {"A100-80GB-SXM", 80, 2.0, 312, 0, 0, 300, 200, 31, 271.2, 0, 40, 108, 8, 8, 8, kMlEngineering},
    {"A800-80GB", 80, 2.0, 312, 0, 0, 200, 200, 31, 271.2, 0, 40, 108, 8, 8, 8, "A100 with NVLink cut to 200 GB/s per direction"},
    {"A100-80GB-PCIe", 80, 1.94, 312, 0, 0, 0, 200, 31, 252.9, 0, 40, 108, 8, 1, 8, kMlEngineering},
    {"H100-80GB-SXM", 79.6, 3.35, 989, 1979, 0, 450, 400, 63, 794.5, 1402.6, 50, 132, 8, 8, 9, kMlEngineering},
    {"H100-96GB-HBM2e", 95, 2.4, 989, 1979, 0, 450, 400, 63, 0, 0, 50, 132, 8, 8, 9, "pytorch/torchtitan benchmarks (b5bcd76): 500 W part, peak not published"},
    {"H100-80GB-PCIe", 79.6, 2.0, 756, 1513, 0, 0, 400, 63, 0, 0, 50, 114, 8, 1, 9, "H100 PCIe data sheet"},
    {"H200-SXM", 140, 4.8, 989, 1979, 0, 450, 400, 63, 794.5, 1453.4, 50, 132, 8, 8, 9, kMlEngineering},
    {"H800-SXM", 79.6, 3.35, 989, 1979, 0, 200, 400, 63, 794.5, 1402.6, 50, 132, 8, 8, 9, "DeepSeek-V3 report, arXiv 2412.19437"},
    {"GH200-96GB", 95, 4.0, 989, 1979, 0, 450, 200, 450, 828.6, 1535, 50, 132, 4, 4, 9, "data sheet; Apertus report for the 200 Gb/s NIC"},
    {"B200-SXM", 179, 8.0, 2250, 4500, 9000, 900, 400, 63, 1745, 3432.5, 126, 148, 8, 8, 10, kMlPerf},
    {"GB200", 185, 8.0, 2500, 5000, 10000, 900, 400, 450, 1822, 3615.6, 126, 148, 4, 72, 10, kMlPerf},
    {"B300-SXM", 270, 8.0, 2250, 4500, 12600, 900, 800, 63, 1769, 3353.3, 126, 148, 8, 8, 10, kMlPerf},
    {"GB300", 277, 8.0, 2500, 5000, 15000, 900, 800, 450, 0, 0, 126, 148, 4, 72, 10, kMlPerf},
    {"MI250X (GCD)", 64, 1.64, 191.5, 0, 0, 50, 100, 32, 0, 0, 8, 110, 8, 8, 0, "Frontier paper, arXiv 2312.12705"},
    {"MI250X", 128, 3.28, 383, 0, 0, 350, 200, 63, 0, 0, 16, 220, 4, 4, 0, "Frontier paper, arXiv 2312.12705"},
    {"MI300X", 192, 5.3, 1307, 2610, 0, 448, 400, 63, 668.4, 0, 256, 304, 8, 8, 0, kMlEngineering},
    {"MI325X", 256, 6.0, 1307, 2610, 0, 448, 400, 63, 784.9, 0, 256, 304, 8, 8, 0, kMlEngineering},
    {"MI355X", 288, 8.0, 2500, 5000, 10100, 535.5, 400, 63, 1565, 0, 256, 256, 8, 8, 0, kMlEngineering},
    {"RTX 4090", 24, 1.008, 165.2, 330.3, 0, 0, 100, 31, 0, 0, 72, 128, 8, 1, 8, "Ada architecture white paper"},
    {"L40S", 48, 0.86, 362, 733, 0, 0, 200, 31, 0, 0, 96, 142, 4, 1, 8, "data sheet; MLPerf Training v4.0 system description"},
    {"TPU v4", 32, 1.2, 275, 0, 0, 300, 50, 0, 0, 0, 128, 2, 4, 4096, 0, "Google Cloud TPU v4 documentation"},
    {"TPU v5e", 16, 0.82, 197, 0, 0, 200, 25, 0, 0, 0, 128, 4, 4, 256, 0, "Google Cloud TPU v5e documentation"},
    {"TPU v5p", 95, 2.765, 459, 0, 0, 600, 50, 0, 0, 0, 128, 2, 4, 8960, 0, "Google Cloud TPU v5p documentation"},
    {"TPU v6e", 32, 1.6, 918, 918, 0, 400, 50, 0, 0, 0, 128, 2, 4, 256, 0, "Google Cloud TPU v6e documentation"},
    {"TPU v7", 192, 7.4, 2307, 4614, 0, 600, 50, 0, 0, 0, 128, 2, 4, 9216, 0, "Google Cloud Ironwood announcement"},
    {"Trainium2", 96, 2.9, 667, 1299, 0, 640, 200, 0, 0, 0, 24, 8, 16, 64, 0, "AWS Trainium2 documentation"},
};

constexpr std::pair<const char*, const char*> kAliases[] = {
    {"a100", "A100-80GB-SXM"},      {"a100-sxm", "A100-80GB-SXM"},         {"a100-80g", "A100-80GB-SXM"},   {"a100-40g", "A100-40GB-SXM"},
    {"h100", "H100-80GB-SXM"},      {"h100-sxm", "H100-80GB-SXM"},         {"h100-pcie", "H100-80GB-PCIe"}, {"h200", "H200-SXM"},
    {"h800", "H800-SXM"},           {"a800", "A800-80GB"},                 {"b200", "B200-SXM"},            {"b300", "B300-SXM"},
    {"v100", "V100-32GB-SXM2"},     {"v100-32gb", "V100-32GB-SXM2"},       {"v100-16gb", "V100-16GB-SXM2"}, {"gh200", "GH200-96GB"},
    {"v100-32gb-sxm", "V100-32GB-SXM2"}, {"mi250x gcd", "MI250X (GCD)"},   {"4090", "RTX 4090"},            {"rtx4090", "RTX 4090"},
};

std::string lower(const std::string& text) {
  std::string out = text;
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

const Device* by_name(const std::string& name) {
  for (const Device& device : kDevices)
    if (lower(device.name) == lower(name)) return &device;
  return nullptr;
}

/// Share of the dense peak that the largest matrix products reach on devices for which the table has no measurement:
/// the middle of the measured ones (0.70 to 0.87).
constexpr double kUsualMatmulShare = 0.79;

/// Power-limited parts: clock ~ power^(1/3), because dynamic power is frequency times voltage squared.
constexpr double kHbm2eH100ClockShare = 0.894;  // (500 W / 700 W)^(1/3)

}  // namespace

const std::vector<Device>& devices() { return kDevices; }

const Device& find_device(const std::string& name) {
  if (const Device* device = by_name(name)) return *device;
  const std::string wanted = lower(name);
  for (const auto& [alias, target] : kAliases)
    if (wanted == alias) return *by_name(target);
  const Device* best = nullptr;
  size_t longest = 0;
  for (const Device& device : kDevices) {
    const std::string known = lower(device.name);
    if (wanted.starts_with(known) && known.size() > longest) best = &device, longest = known.size();
  }
  if (best == nullptr)
    for (const auto& [alias, target] : kAliases)
      if (wanted.starts_with(alias) && std::string(alias).size() > longest && std::string(alias).size() > 4) best = by_name(target), longest = std::string(alias).size();
  if (best != nullptr) return *best;
  std::string known;
  for (const Device& device : kDevices) known += (known.empty() ? "" : ", ") + device.name;
  throw ConfigError("device \"" + name + "\" is not in the table; known: " + known);
}

Precision parse_precision(const std::string& text) {
  const std::string name = lower(text);
  if (name.empty() || name == "bf16") return Precision::bf16;
  if (name == "fp16") return Precision::fp16;
  if (name == "fp8") return Precision::fp8;
  if (name == "fp4") return Precision::fp4;
  if (name == "fp32" || name == "tf32") return Precision::fp32;
  throw ConfigError("precision \"" + text + "\" is not known; use bf16, fp16, fp8, fp4 or fp32");
}

const char* precision_name(Precision precision) {
  constexpr const char* kNames[] = {"fp32", "fp16", "bf16", "fp8", "fp4"};
  return kNames[static_cast<int>(precision)];
}

double peak_tflops(const Device& device, Precision precision) {
  switch (precision) {
    case Precision::fp32: return device.bf16_tflops / 2;  // TF32 runs at half the bf16 rate
    case Precision::fp4: return device.fp4_tflops > 0 ? device.fp4_tflops : peak_tflops(device, Precision::fp8);
    case Precision::fp8: return device.fp8_tflops > 0 ? device.fp8_tflops : device.bf16_tflops;
    default: return device.bf16_tflops;
  }
}

double matmul_tflops(const Device& device, Precision precision) {
  if (device.name == "H100-96GB-HBM2e") return kHbm2eH100ClockShare * matmul_tflops(*by_name("H100-80GB-SXM"), precision);
  switch (precision) {
    case Precision::fp32: return device.matmul_fp32_tflops > 0 ? device.matmul_fp32_tflops : matmul_tflops(device, Precision::bf16) / 2;
    case Precision::fp4: {
      // No public measurement: the fp8 share of peak.
      const double fp8 = matmul_tflops(device, Precision::fp8);
      return device.fp4_tflops > 0 && device.fp8_tflops > 0 ? fp8 * device.fp4_tflops / device.fp8_tflops : fp8;
    }
    case Precision::fp8:
      if (device.matmul_fp8_tflops > 0) return device.matmul_fp8_tflops;
      if (device.fp8_tflops > 0) return std::max(0.9 * kUsualMatmulShare * device.fp8_tflops, matmul_tflops(device, Precision::bf16));  // fp8 shares are a tenth lower
      return matmul_tflops(device, Precision::bf16);
    default: return device.matmul_bf16_tflops > 0 ? device.matmul_bf16_tflops : kUsualMatmulShare * device.bf16_tflops;
  }
}

}  // namespace weft::machine
