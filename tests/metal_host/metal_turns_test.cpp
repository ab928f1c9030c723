// Fractions of a turn that Metal computes on integers have the bits that doubles give.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
// After the library's headers: it brings Metal's words.
#include "metal/kernels/turns.h"

namespace gyre::test {
namespace {

uint64_t fraction_of_double(double turns) {
  if (!(std::fabs(turns) < 0x1p62)) return 0;
  const double fraction = turns - std::floor(turns);
  return fraction >= 1.0 ? 0 : static_cast<uint64_t>(fraction * 0x1p64);
}

class Numbers {
 public:
  // Any finite float; most of a size that models have, some with few bits, for ties.
  float any_float() {
    const uint64_t bits = random_();
    uint32_t pattern = static_cast<uint32_t>(bits);
    if (bits >> 60 != 0)
      pattern = (pattern & 0x807FFFFFu) | static_cast<uint32_t>(100 + (bits >> 40) % 60) << 23;
    if ((bits >> 57) % 8 == 1) pattern &= 0xFFFF0000u;
    const float value = std::bit_cast<float>(pattern);
    return std::isfinite(value) ? value : 1.0f;
  }
  uint64_t any_turns() {
    const uint64_t turns = random_() >> random_() % 64;
    return random_() % 2 == 0 ? turns : 0 - turns;
  }

 private:
  std::mt19937_64 random_{28};
};

TEST(MetalTurns, AreThoseOfDoubles) {
  constexpr double kTurnsPerRadian = 0.15915494309189533577;
  Numbers numbers;
  for (int i = 0; i < 300000; ++i) {
    const float radians = numbers.any_float(), other = numbers.any_float();
    const float factor = other == 0 ? 1.0f : other;
    const uint64_t table = numbers.any_turns();
    const double from_radians = radians * kTurnsPerRadian;
    const double from_table = static_cast<double>(static_cast<int64_t>(table)) * 0x1p-64;
    const metal::Double a = metal::turns_of_radians(radians), b = metal::turns_of_table(table);
    ASSERT_EQ(metal::fraction_of(a), fraction_of_double(from_radians)) << radians;
    ASSERT_EQ(metal::fraction_of(b), fraction_of_double(from_table)) << table;
    ASSERT_EQ(metal::fraction_of(metal::divide(a, factor)),
              fraction_of_double(from_radians / static_cast<double>(factor)))
        << radians << " / " << factor;
    ASSERT_EQ(metal::fraction_of(metal::divide(b, factor)),
              fraction_of_double(from_table / static_cast<double>(factor)))
        << table << " / " << factor;
  }
}

TEST(MetalTurns, OfWholeTurnsAndEdges) {
  const float cases[] = {0.0f, -0.0f, 1.0f, -1.0f, 0x1p-149f, -0x1p-149f, 0x1p127f, -0x1p62f};
  for (const float radians : cases) {
    EXPECT_EQ(metal::fraction_of(metal::turns_of_radians(radians)),
              fraction_of_double(radians * 0.15915494309189533577))
        << radians;
  }
  for (const uint64_t table : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, uint64_t{1} << 63}) {
    EXPECT_EQ(metal::fraction_of(metal::turns_of_table(table)),
              fraction_of_double(static_cast<double>(static_cast<int64_t>(table)) * 0x1p-64))
        << table;
  }
}

}  // namespace
}  // namespace gyre::test
