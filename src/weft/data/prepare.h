// Text files to token files, as a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  ///< read one after the other, joined as they are; "-" is standard input
  std::string out;                  ///< folder, made if missing
  std::string tokenizer = "bytes";
  double val_fraction = 0.05;  ///< the last share of the tokens becomes val.bin; 0: no val.bin
};

struct PrepareResult {
  std::string train_path, val_path;  ///< val_path is empty without validation tokens
  int64_t bytes = 0;                 ///< text read
  int64_t train_tokens = 0, val_tokens = 0;
  std::vector<std::string> empty_inputs;
  std::vector<std::string> replaced;  ///< files of an earlier preparation that are gone now
};

/// Bytes read so far, and of all inputs (0 when one of them has no size, such as a pipe).
using PrepareProgress = std::function<void(int64_t done, int64_t total)>;

/// Writes out/train.bin and out/val.bin, in place of those of an earlier preparation: an old val.bin goes even when there is no new
/// one, and at no moment do an old and a new file stand side by side. Memory use does not depend on the inputs' size. ConfigError: an
/// input cannot be read, no text at all, val_fraction outside [0, 1), another process writes there. On an error nothing changes.
PrepareResult prepare(const PrepareOptions& options, const PrepareProgress& progress = {});

}  // namespace weft::data
