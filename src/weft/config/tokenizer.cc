#include "weft/config/tokenizer.h"

#include <fmt/format.h>

#include "weft/core/error.h"

namespace weft::config {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::string id() const override { return "bytes"; }
  int64_t vocab() const override { return 256; }
  void encode(std::string_view text, std::vector<uint32_t>& tokens) const override {
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  }
  std::string decode(std::span<const uint32_t> tokens) const override {
    std::string text;
    for (const uint32_t token : tokens) text.push_back(static_cast<char>(token));
    return text;
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& id) {
  if (id == "bytes") return std::make_unique<ByteTokenizer>();
  throw ConfigError(fmt::format("tokenizer '{}' is unknown (there is: bytes)", id));
}

}  // namespace weft::config
