#include "gyre/dtype.h"

#include "gyre_test.h"
#include "reference.h"
#include "rounding.h"

namespace gyre::test {
namespace {

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

TEST(DType, SizesAndNames) {
  constexpr uint64_t kSizes[] = {4, 2, 2, 1, 4, 4, 8};
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "u8", "i32", "u32", "i64"};
  for (uint32_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(size_bytes(dtype), kSizes[i]);
    EXPECT_EQ(name(dtype), kNames[i]);
    EXPECT_EQ(is_float(dtype), i < 3);
  }
  EXPECT_EQ(size_bytes(static_cast<DType>(kDTypeCount)), 0u);
  EXPECT_EQ(name(static_cast<DType>(kDTypeCount)), "invalid");
}

TEST(ErrorCode, Names) {
  EXPECT_EQ(name(ErrorCode::invalid_argument), "invalid_argument");
  EXPECT_EQ(name(ErrorCode::unsupported), "unsupported");
  EXPECT_EQ(name(ErrorCode::out_of_memory), "out_of_memory");
  EXPECT_EQ(name(ErrorCode::compile_failed), "compile_failed");
  EXPECT_EQ(name(ErrorCode::device_lost), "device_lost");
  EXPECT_EQ(name(ErrorCode::io), "io");
}

TEST(Half, WidensEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = Half::from_bits(static_cast<uint16_t>(bits));
    ASSERT_EQ(bits_of(static_cast<float>(half)), reference::convert(DType::f16, DType::f32, bits))
        << bits;
  }
}

TEST(BFloat16, WidensEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = BFloat16::from_bits(static_cast<uint16_t>(bits));
    ASSERT_EQ(bits_of(static_cast<float>(value)), bits << 16) << bits;
  }
}

// Rounding is a staircase: where it steps, and that it is flat in between, says everything.
TEST(Half, NarrowsAtEveryBoundary) {
  for (const uint32_t bits : rounding_boundaries(DType::f16)) {
    ASSERT_EQ(Half(float_of(bits)).bits, reference::convert(DType::f32, DType::f16, bits))
        << std::hex << bits;
  }
}

TEST(BFloat16, NarrowsAtEveryBoundary) {
  for (const uint32_t bits : rounding_boundaries(DType::bf16)) {
    ASSERT_EQ(BFloat16(float_of(bits)).bits, reference::convert(DType::f32, DType::bf16, bits))
        << std::hex << bits;
  }
}

TEST(Half, NarrowsAnyBits) {
  std::mt19937 random(5);
  for (int i = 0; i < 1000000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    ASSERT_EQ(Half(float_of(bits)).bits, reference::convert(DType::f32, DType::f16, bits))
        << std::hex << bits;
    ASSERT_EQ(BFloat16(float_of(bits)).bits, reference::convert(DType::f32, DType::bf16, bits))
        << std::hex << bits;
  }
}

// What the page says, in numbers a reader can check by hand.
TEST(Half, NamedValues) {
  EXPECT_EQ(Half(1.0f).bits, 0x3C00);
  EXPECT_EQ(Half(-0.0f).bits, 0x8000);
  EXPECT_EQ(Half(65504.0f).bits, 0x7BFF);
  EXPECT_EQ(Half(65519.99f).bits, 0x7BFF);
  EXPECT_EQ(Half(65520.0f).bits, 0x7C00);
  EXPECT_EQ(Half(-65520.0f).bits, 0xFC00);
  EXPECT_EQ(Half(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(Half(0x1p-25f).bits, 0x0000) << "a tie, to even";
  EXPECT_EQ(Half(0x1.8p-24f).bits, 0x0002) << "a tie, to even";
  EXPECT_EQ(Half(std::numeric_limits<float>::quiet_NaN()).bits, 0x7E00);
  EXPECT_EQ(Half(float_of(0xFFC12345u)).bits, 0x7E00);
  EXPECT_EQ(bits_of(static_cast<float>(Half::from_bits(0xFD01))), 0xFFE02000u)
      << "quiet, sign and payload kept";
}

TEST(BFloat16, NamedValues) {
  EXPECT_EQ(BFloat16(1.0f).bits, 0x3F80);
  EXPECT_EQ(BFloat16(float_of(0x3F808000u)).bits, 0x3F80) << "a tie, to even";
  EXPECT_EQ(BFloat16(float_of(0x3F818000u)).bits, 0x3F82) << "a tie, to even";
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(BFloat16(float_of(0x7F800001u)).bits, 0x7FC0);
  EXPECT_EQ(BFloat16(float_of(0xFFFFFFFFu)).bits, 0x7FC0);
}

TEST(Half, WorksInConstantExpressions) {
  static_assert(Half(1.5f).bits == 0x3E00);
  static_assert(static_cast<float>(Half::from_bits(0x3E00)) == 1.5f);
  static_assert(BFloat16(1.5f).bits == 0x3FC0);
  static_assert(static_cast<float>(BFloat16::from_bits(0x3FC0)) == 1.5f);
  static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2);
}

// The reference itself, against the compiler where it has an f16 of its own.
#if defined(__aarch64__)
TEST(Reference, AgreesWithTheCompiler) {
  for (const uint32_t bits : rounding_boundaries(DType::f16)) {
    const float value = float_of(bits);
    if (std::isnan(value)) continue;
    const auto narrow = static_cast<__fp16>(value);
    ASSERT_EQ(std::bit_cast<uint16_t>(narrow), reference::convert(DType::f32, DType::f16, bits))
        << value;
  }
}
#endif

}  // namespace
}  // namespace gyre::test
