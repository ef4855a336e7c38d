#include "weft/core/cause.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(CauseText, LosesTheStackOfLibtorch) {
  EXPECT_EQ(cause_text("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)\nException raised from meta at "
                       "/pytorch/aten/src/ATen/native/LinearAlgebra.cpp:199 (most recent call first):\n#0 c10::Error::Error\n#1 main\n"),
            "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)");
}

TEST(CauseText, LosesThePlaceInTheSourcesOfGloo) {
  EXPECT_EQ(cause_text("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"),
            "Connection closed by peer [127.0.0.1]:4711");
  EXPECT_EQ(cause_text("[enforce fail at alloc_cpu.cpp:127] err == 0. you tried to allocate 8 bytes."),
            "err == 0. you tried to allocate 8 bytes.");
}

TEST(CauseText, KeepsWhatIsNoTrace) {
  EXPECT_EQ(cause_text("config run.toml: 2 problems\n  train.lr: 1\n  train.steps: 2"), "config run.toml: 2 problems\n  train.lr: 1\n  train.steps: 2");
  EXPECT_EQ(cause_text("an Exception raised from a hook"), "an Exception raised from a hook");
  EXPECT_EQ(cause_text("[rank 1] no data"), "[rank 1] no data");
  EXPECT_EQ(cause_text("[a: b] no data"), "[a: b] no data");
  EXPECT_EQ(cause_text(""), "");
  EXPECT_EQ(cause_text("\n"), "");
}

TEST(CauseText, LineIsTheFirst) {
  EXPECT_EQ(cause_line("[x.cc:1] one\ntwo\nException raised from f"), "one");
  EXPECT_EQ(cause_line("one"), "one");
}

}  // namespace
}  // namespace weft
