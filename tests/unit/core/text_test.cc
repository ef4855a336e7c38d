#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "tests/support/message.h"
#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/core/nearest.h"
#include "weft/core/progress.h"
#include "weft/core/units.h"

namespace weft {
namespace {

struct TemporaryFolder {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("weft_text_test_" + std::to_string(::getpid()));
  TemporaryFolder() { std::filesystem::create_directories(path); }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
};

TEST(Units, Bytes) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(1024), "1 KiB");
  EXPECT_EQ(bytes_text(1.3 * 1024 * 1024 * 1024), "1.3 GiB");
  EXPECT_EQ(bytes_text(1023.9 * 1024 * 1024), "1 GiB");
  EXPECT_EQ(bytes_text(-1536), "-1.5 KiB");
  EXPECT_EQ(bytes_text(5e18), "4441 PiB");
  EXPECT_EQ(bytes_text(std::nan("")), "nan");
}

TEST(Units, CountsRatesFlops) {
  EXPECT_EQ(count_text(412), "412");
  EXPECT_EQ(count_text(3151872), "3.15 M");
  EXPECT_EQ(count_text(999.7), "1 K");
  EXPECT_EQ(count_text(70.6e9), "70.6 B");
  EXPECT_EQ(rate_text(412, "tok"), "412 tok/s");
  EXPECT_EQ(rate_text(0.05, "step"), "0.05 step/s");
  EXPECT_EQ(bandwidth_text(3.1e9), "3.1 GB/s");
  EXPECT_EQ(flops_text(1.2e12), "1.2 TFLOP");
}

TEST(Units, Seconds) {
  EXPECT_EQ(seconds_text(0), "0 s");
  EXPECT_EQ(seconds_text(8.2e-4), "820 us");
  EXPECT_EQ(seconds_text(0.0123), "12.3 ms");
  EXPECT_EQ(seconds_text(0.99999), "1 s");
  EXPECT_EQ(seconds_text(1.34), "1.34 s");
  EXPECT_EQ(seconds_text(59.97), "1 min");
  EXPECT_EQ(seconds_text(123), "2 min 3 s");
  EXPECT_EQ(seconds_text(3599.9), "1 h");
  EXPECT_EQ(seconds_text(3 * 3600 + 12 * 60 + 4), "3 h 12 min");
  EXPECT_EQ(seconds_text(86400 * 5 + 7200), "5 d 2 h");
  EXPECT_EQ(seconds_text(-2), "-2 s");
}

TEST(Nearest, EditDistance) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("tarin", "train"), 1u);  // a swap of neighbours is one slip
}

TEST(Nearest, NamesAndHints) {
  const std::vector<std::string> keys{"train", "run", "data", "generate"};
  EXPECT_EQ(nearest("tarin", keys, 2), (std::vector<std::string>{"train", "run"}));
  EXPECT_EQ(did_you_mean("generat", keys), "did you mean 'generate'?");
  EXPECT_EQ(did_you_mean("xyz", keys), "known: train, run, data, generate");
}

TEST(JsonHelpers, ParseErrorNamesThePlace) {
  const std::string text = testing::config_error([] { parse_json("{\n  \"a\": 1,\n  \"b\": oops\n}", "x.json"); });
  EXPECT_EQ(text.substr(0, 10), "x.json:3:8") << text;
  EXPECT_NE(text.find("not valid JSON"), std::string::npos) << text;
}

TEST(JsonHelpers, MissingAndMistypedFields) {
  const Json object = parse_json(R"({"hidden_size": 8, "name": "x"})", "c.json");
  EXPECT_EQ(json_field<int>(object, "hidden_size", "c.json"), 8);
  EXPECT_EQ(json_field_or<int>(object, "layers", 3, "c.json"), 3);
  EXPECT_EQ(testing::config_error([&] { json_field<int>(object, "hiden_size", "c.json"); }),
            "c.json: key 'hiden_size' is missing (did you mean 'hidden_size'?)");
  EXPECT_NE(testing::config_error([&] { json_field_or<int>(object, "name", 3, "c.json"); }).find("\"x\" has the wrong type"),
            std::string::npos);
  EXPECT_NE(testing::config_error([&] { json_field<int>(Json(3), "a", "c.json"); }).find("an object is needed"),
            std::string::npos);
}

TEST(JsonHelpers, FilesRoundTripAndErrorsNameThem) {
  const TemporaryFolder folder;
  write_text(folder.path / "a.json", "{\"z\": 1, \"a\": 2}");
  write_text(folder.path / "a.json", "{\"z\": 3, \"a\": 2}");
  EXPECT_EQ(read_json(folder.path / "a.json").dump(), "{\"z\":3,\"a\":2}");  // key order is the file's
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path), {}), 1);
  EXPECT_NE(testing::config_error([&] { read_text(folder.path / "none"); }).find("none: cannot be opened"), std::string::npos);
  EXPECT_NE(testing::config_error([&] { write_text(folder.path / "no" / "x", ""); }).find("cannot be written"), std::string::npos);
}

TEST(Progress, FitsColumns) {
  EXPECT_EQ(fit_columns("abcdef", 6), "abcdef");
  EXPECT_EQ(fit_columns("abcdefg", 6), "abc...");
  EXPECT_EQ(fit_columns("äöüäöü", 6), "äöüäöü");
  EXPECT_EQ(fit_columns("äöüäöüä", 6), "äöü...");
  EXPECT_EQ(fit_columns("abc", 2), "ab");
  EXPECT_EQ(fit_columns("abc", 0), "");
}

TEST(Progress, PlainLinesWithoutATerminal) {
  const TemporaryFolder folder;
  const std::filesystem::path file = folder.path / "log";
  std::FILE* out = std::fopen(file.c_str(), "w");
  {
    ProgressLine line({.out = out, .plain_interval = std::chrono::hours(1)});
    EXPECT_FALSE(line.terminal());
    line.show("step 1");
    line.show("step 2");
    line.keep("saved");
    line.show("step 3");
  }
  std::fclose(out);
  EXPECT_EQ(read_text(file), "step 1\nsaved\nstep 3\n");
}

TEST(Progress, OneRewrittenLineOnATerminal) {
  const TemporaryFolder folder;
  const std::filesystem::path file = folder.path / "log";
  std::FILE* out = std::fopen(file.c_str(), "w");
  ::setenv("WEFT_PROGRESS", "terminal", 1);
  ::setenv("COLUMNS", "10", 1);
  {
    ProgressLine line({.out = out, .redraw_interval = std::chrono::milliseconds(0)});
    line.show("step 1");
    line.show("step 2 of a long line");
    line.keep("saved");
    line.show("step 3");
  }
  ::unsetenv("WEFT_PROGRESS");
  ::unsetenv("COLUMNS");
  std::fclose(out);
  EXPECT_EQ(read_text(file), "\rstep 1\033[K\rstep 2...\033[K\r\033[Ksaved\n\rstep 3\033[K\n");
}

TEST(Errors, FindingsAreToldTogether) {
  Findings findings;
  findings.throw_if_any("nothing");
  findings.add("train.lr", "-1 is negative; it must be positive", "use 1e-3");
  findings.add("layout.dp", "0 ranks");
  EXPECT_EQ(
      testing::config_error([&] { findings.throw_if_any("x.toml"); }),
      "x.toml: 2 problems\n  train.lr: -1 is negative; it must be positive\n    -> use 1e-3\n  layout.dp: 0 ranks");
  EXPECT_EQ(findings.text(), "train.lr: -1 is negative; it must be positive (use 1e-3)\nlayout.dp: 0 ranks\n");
}

}  // namespace
}  // namespace weft
