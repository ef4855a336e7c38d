// The 128-byte header of token files (layout in token_file.h): bytes to TokenFileInfo and back.
#pragma once

#include <array>
#include <span>
#include <string>

#include "weft/data/token_file.h"

namespace weft::data {

inline constexpr size_t kTokenHeaderBytes = 128;

std::array<unsigned char, kTokenHeaderBytes> encode_header(const TokenFileInfo& info);

/// `file` is the whole file; its size is checked against the header. ConfigError names `path`.
TokenFileInfo decode_header(const std::string& path, std::span<const unsigned char> file);

}  // namespace weft::data
