// Tokenizers: text to ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::config {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// The name that make_tokenizer takes; token files carry it.
  virtual std::string id() const = 0;
  /// Ids are below it.
  virtual int64_t vocab() const = 0;
  /// Appends the ids of `text` to `tokens`. Any bytes are text: nothing is skipped or replaced.
  virtual void encode(std::string_view text, std::vector<uint32_t>& tokens) const = 0;
  virtual std::string decode(std::span<const uint32_t> tokens) const = 0;
};

/// "bytes": each byte is its own id, vocabulary 256. ConfigError names what exists.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& id);

}  // namespace weft::config
