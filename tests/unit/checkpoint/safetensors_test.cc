#include "weft/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"
#include "weft/core/error.h"

namespace weft::checkpoint {
namespace {

void write_raw(const std::string& path, const std::string& header, size_t data_bytes) {
  std::ofstream file(path, std::ios::binary);
  const uint64_t length = header.size();
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << header << std::string(data_bytes, '\0');
}

std::string error_of(const std::string& header, size_t data_bytes) {
  const testing::TempDir dir;
  write_raw(dir / "x.safetensors", header, data_bytes);
  try {
    SafetensorsFile file(dir / "x.safetensors");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Safetensors, RoundTripOfEveryDtype) {
  const testing::TempDir dir;
  torch::manual_seed(1);
  std::vector<NamedTensor> tensors;
  for (const auto type : {torch::kByte, torch::kBFloat16, torch::kDouble, torch::kFloat, torch::kHalf, torch::kLong, torch::kInt, torch::kBool})
    tensors.push_back({"t." + std::string(c10::toString(type)), (torch::rand({3, 5}) * 9).to(type)});
  tensors.push_back({"scalar", torch::tensor(2.5)});
  tensors.push_back({"empty", torch::empty({0, 4})});
  tensors.push_back({"transposed", torch::rand({4, 2}).t()});
  write_safetensors(dir / "x.safetensors", tensors, {{"format", "pt"}});

  const SafetensorsFile file(dir / "x.safetensors");
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const NamedTensor& t : tensors) {
    const auto read = file.tensor(t.name);
    EXPECT_EQ(read.scalar_type(), t.tensor.scalar_type()) << t.name;
    EXPECT_TRUE(torch::equal(read, t.tensor)) << t.name;
  }
  EXPECT_THROW(file.tensor("missing"), ConfigError);
}

TEST(Safetensors, TensorsOutliveTheFileAndWritingLeavesItAlone) {
  const testing::TempDir dir;
  write_safetensors(dir / "x", {{"a", torch::ones({4})}});
  const auto a = SafetensorsFile(dir / "x").tensor("a");
  a.fill_(7);
  EXPECT_EQ(a.sum().item<float>(), 28);
  EXPECT_EQ(SafetensorsFile(dir / "x").tensor("a").sum().item<float>(), 4);
}

// Every bit of the numbers, the names and the shapes counts; the digits themselves, too.
TEST(Safetensors, AFlippedBitIsFound) {
  const testing::TempDir dir;
  write_safetensors(dir / "x", {{"a", torch::rand({100})}, {"b", torch::ones({3}, torch::kBFloat16)}}, {{"format", "pt"}});
  std::ifstream in(dir / "x", std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  const size_t name = whole.find("\"a\"") + 1, digits = whole.find("xxh64:") + 6;
  EXPECT_NO_THROW(SafetensorsFile(dir / "x"));
  for (const size_t at : {whole.size() - 1, whole.size() - 406, name, digits}) {
    std::string flipped = whole;
    flipped[at] ^= 1;
    std::ofstream(dir / "y", std::ios::binary) << flipped;
    try {
      SafetensorsFile(dir / "y");
      ADD_FAILURE() << "byte " << at << " of " << whole.size();
    } catch (const ConfigError& e) {
      EXPECT_THAT(e.what(), ::testing::HasSubstr("the checksum of its contents is xxh64:")) << at;
    }
  }
}

TEST(Safetensors, RefusesTwoTensorsOfOneNameAndUnknownDtypes) {
  const testing::TempDir dir;
  EXPECT_THROW(write_safetensors(dir / "x", {{"a", torch::ones(1)}, {"a", torch::ones(1)}}), ConfigError);
  EXPECT_THROW(write_safetensors(dir / "x", {{"a", torch::ones(1, torch::kComplexFloat)}}), ConfigError);
  EXPECT_THROW(write_safetensors(dir / "no/such/folder/x", {{"a", torch::ones(1)}}), ConfigError);
}

TEST(Safetensors, IsWrittenInAnyOrderOrNotAtAll) {
  const testing::TempDir dir;
  const at::Tensor a = torch::rand({5}), b = torch::rand({2, 3}, torch::kDouble);
  const std::vector<TensorEntry> entries{{"a", at::kFloat, {5}}, {"b", at::kDouble, {2, 3}}};
  {
    SafetensorsWriter writer(dir / "x", entries);
    writer.write("a", a);
    EXPECT_THROW(writer.write("a", a), InternalError) << "twice";
    EXPECT_THROW(writer.write("b", a), InternalError) << "another shape";
    EXPECT_THROW(writer.write("c", a), InternalError) << "not stated";
    EXPECT_THROW(writer.finish(), InternalError) << "b is missing";
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path())) << "nothing is left of a file that was not finished";
  SafetensorsWriter writer(dir / "x", entries);
  writer.write("a", a);
  writer.write("b", b);
  writer.finish();
  const SafetensorsFile file(dir / "x");
  EXPECT_TRUE(torch::equal(file.tensor("a"), a));
  EXPECT_TRUE(torch::equal(file.tensor("b"), b));
}

TEST(Safetensors, SaysWhatIsWrongWithAFile) {
  using ::testing::HasSubstr;
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(error_of("{" + a + "}", 8), "accepted");
  EXPECT_THAT(error_of("{" + a + "}", 7), HasSubstr("truncated"));
  EXPECT_THAT(error_of("{" + a + "}", 9), HasSubstr("belong to none"));
  EXPECT_THAT(error_of("{" + a + "," + a + "}", 8), HasSubstr("twice"));
  EXPECT_THAT(error_of("{" + a, 8), HasSubstr("JSON"));
  EXPECT_THAT(error_of("[]", 0), HasSubstr("JSON object"));
  EXPECT_THAT(error_of("{" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8), HasSubstr("overlap"));
  EXPECT_THAT(error_of("{" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", 16), HasSubstr("hole"));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8), HasSubstr("non-negative"));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8), HasSubstr("non-negative"));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8), HasSubstr("needs 12"));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8), HasSubstr("overflows"));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"Q3","shape":[2],"data_offsets":[0,8]}})", 8), HasSubstr("Q3"));
  EXPECT_THAT(error_of(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8), HasSubstr("needs dtype"));
  const testing::TempDir dir;
  std::ofstream(dir / "short") << "abc";
  EXPECT_THROW(SafetensorsFile(dir / "short"), ConfigError);
  EXPECT_THROW(SafetensorsFile(dir / "missing"), ConfigError);
  EXPECT_THROW(SafetensorsFile(dir.path()), ConfigError);
}

}  // namespace
}  // namespace weft::checkpoint
