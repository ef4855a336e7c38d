// Element types and reductions of the local back end, without torch.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace weft::local {

/// The largest number of ranks on one machine that the back end takes.
inline constexpr int kMaxRanks = 128;
using RankSet = std::bitset<kMaxRanks>;  ///< world ranks

enum class Dtype : uint8_t { f32, f64, bf16, f16, i8, u8, i16, i32, i64, boolean, other };
enum class Reduce : uint8_t { sum, avg, min, max, product, none };

/// Bytes of an element; `other` types are moved as bytes.
constexpr size_t element_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
    case Dtype::i64: return 8;
    case Dtype::f32:
    case Dtype::i32: return 4;
    case Dtype::bf16:
    case Dtype::f16:
    case Dtype::i16: return 2;
    default: return 1;
  }
}

constexpr std::string_view name_of(Dtype dtype) {
  constexpr std::string_view names[] = {"fp32", "fp64", "bf16", "fp16", "int8", "uint8", "int16", "int32", "int64", "bool", "bytes"};
  return names[static_cast<size_t>(dtype)];
}

constexpr std::string_view name_of(Reduce reduce) {
  constexpr std::string_view names[] = {"sum", "avg", "min", "max", "product", "none"};
  return names[static_cast<size_t>(reduce)];
}

}  // namespace weft::local
