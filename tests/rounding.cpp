#include "rounding.h"

#include <bit>

#include "gyre_test.h"
#include "reference.h"

namespace gyre::test {

std::vector<uint32_t> rounding_boundaries(DType narrow) {
  const reference::Format& format = reference::format_of(narrow);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values;
  const auto add = [&](float value) {
    values.push_back(value);
    values.push_back(-value);
  };
  const auto add_with_neighbours = [&](double value) {
    const auto nearest = static_cast<float>(value);
    add(std::nextafter(nearest, 0.0f));
    add(nearest);
    add(std::nextafter(nearest, kInfinity));
  };
  for (uint32_t pattern = 0; pattern < format.infinity(); ++pattern) {
    const double value = reference::magnitude_of(format, pattern);
    const double next = reference::magnitude_of(format, pattern + 1);
    add(static_cast<float>(value));
    add_with_neighbours((value + next) / 2);
  }
  for (const double special : {65504.0, 65519.99, 65520.0, 0x1p-24, 0x1p-25, 0x1p-126, 0x1p-149})
    add(static_cast<float>(special));
  add(kInfinity);
  std::vector<uint32_t> bits;
  bits.reserve(values.size());
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  for (const uint32_t nan : {0x7F800001u, 0x7F801000u, 0x7FA00000u, 0x7FBFFFFFu, 0x7FC00000u,
                             0x7FC12345u, 0x7FFFFFFFu, 0x7F80FFFFu, 0x7F810000u}) {
    bits.push_back(nan);
    bits.push_back(nan | 0x80000000u);
  }
  return bits;
}

std::vector<uint32_t> all_16_bit_patterns() {
  std::vector<uint32_t> bits(65536);
  for (uint32_t i = 0; i < bits.size(); ++i) bits[i] = i;
  return bits;
}

}  // namespace gyre::test
