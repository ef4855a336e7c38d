// Shared by the schedule tests: the golden cases, and random sizes that every generator accepts.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <random>
#include <string>

#include "weft/schedule/generate.h"

namespace weft::schedule::test {

inline nlohmann::json golden_cases() {
  std::ifstream file(WEFT_TEST_DATA "/schedules/goldens.json");
  return nlohmann::json::parse(file).at("cases");
}

inline Sizes sizes_of(const nlohmann::json& golden) {
  return {golden.at("ranks").get<int>(), golden.at("microbatches").get<int>(), golden.at("chunks").get<int>()};
}

/// A random generator with sizes up to `largest` (fewer micro-batches than ranks and non-multiples included).
struct Draw {
  const Generator* generator;
  Sizes sizes;
  std::string text() const {
    return std::string(generator->name) + " p=" + std::to_string(sizes.ranks) +
           " m=" + std::to_string(sizes.micro_batches) + " v=" + std::to_string(sizes.chunks);
  }
};
inline Draw draw(std::mt19937& random, int largest_ranks, int largest_micro_batches) {
  const auto upto = [&](int n) { return std::uniform_int_distribution<int>(1, n)(random); };
  const Generator& generator = generators()[static_cast<size_t>(upto(static_cast<int>(generators().size())) - 1)];
  const Sizes sizes{upto(largest_ranks), upto(largest_micro_batches),
                    generator.fixed_chunks ? generator.fixed_chunks : upto(4)};
  return {&generator, sizes};
}

}  // namespace weft::schedule::test
