// Quantities as people read them. Values are plain doubles in the base unit that the name states.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

/// "0 B", "640 KiB", "1.3 GiB". Powers of 1024; three significant digits.
std::string bytes_text(double bytes);
/// "412", "3.15 M", "70.6 B": counts of parameters or tokens. Powers of 1000 with K, M, B, T.
std::string count_text(double count);
/// "412 tok/s", "1.2 M tok/s".
std::string rate_text(double per_second, const std::string& what);
/// "3.1 GB/s": bandwidths, powers of 1000.
std::string bandwidth_text(double bytes_per_second);
/// "820 us", "1.3 s", "2 min 3 s", "3 h 12 min", "5 d 2 h".
std::string seconds_text(double seconds);
/// "1.2 TFLOP": powers of 1000.
std::string flops_text(double flops);
/// 1, 2, 3, 6 for 6: the legal sizes of groups that `n` ranks divide into.
std::vector<int64_t> divisors(int64_t n);

}  // namespace weft
