#include "weft/train/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace weft::train {
namespace {

StepRecord record() {
  return {.step = 120,
          .loss = 1.83421,
          .val_loss = 1.9,
          .tokens_per_s = 31415.9,
          .grad_norm = 0.8123,
          .lr = 2e-3,
          .tokens = 983040,
          .epoch = 0.2345,
          .step_s = 0.26,
          .elapsed_s = 31.5};
}

TEST(Metrics, JsonHasTheDocumentedKeysAndExactNumbers) {
  const auto json = nlohmann::json::parse(to_json(record()));
  EXPECT_EQ(json.size(), 15u);
  EXPECT_TRUE(json["bubble"].is_null());
  EXPECT_TRUE(json["val_loss_ema"].is_null());
  EXPECT_EQ(json["skipped"], false);
  EXPECT_TRUE(json["loss_scale"].is_null());
  EXPECT_TRUE(json["memory"].is_null());
  EXPECT_EQ(json["step"], 120);
  EXPECT_EQ(json["loss"].get<double>(), 1.83421);
  EXPECT_EQ(json["val_loss"].get<double>(), 1.9);
  EXPECT_EQ(json["tokens"], 983040);
  StepRecord without = record();
  without.val_loss.reset();
  EXPECT_TRUE(nlohmann::json::parse(to_json(without))["val_loss"].is_null());
}

TEST(Metrics, MemoryIsByCategory) {
  StepRecord counted = record();
  counted.memory = {1, 2, 3, 4, 5, 6};
  const auto json = nlohmann::json::parse(to_json(counted))["memory"];
  EXPECT_EQ(json, nlohmann::json::parse(R"({"parameters": 1, "gradients": 2, "optimizer": 3, "activations": 4,
                                            "communication": 5, "other": 6})"));
}

TEST(Metrics, LineIsForPeople) {
  EXPECT_EQ(to_line(record(), 500, 102.0),
            "step 120/500  loss 1.8342  val 1.9000  31.4k tok/s  grad 0.812  lr 2.00e-03  left 1:42");
}

TEST(Metrics, AveragedWeightsHaveTheirOwnLoss) {
  StepRecord averaged = record();
  averaged.val_loss_ema = 1.75;
  EXPECT_THAT(to_line(averaged, 500, {}), ::testing::HasSubstr("val 1.9000 (averaged weights 1.7500)"));
  EXPECT_EQ(nlohmann::json::parse(to_json(averaged))["val_loss_ema"], 1.75);
}

TEST(Metrics, NumbersAndTimesAreShort) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(999), "999");
  EXPECT_EQ(short_number(999.6), "1k");
  EXPECT_EQ(short_number(1234567), "1.23M");
  EXPECT_EQ(clock_time(7), "0:07");
  EXPECT_EQ(clock_time(59.6), "1:00");
  EXPECT_EQ(clock_time(10931), "3:02:11");
}

}  // namespace
}  // namespace weft::train
