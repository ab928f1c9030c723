#pragma once
// Choices that a fuzzed input makes, byte by byte. At its end every choice is the first one.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#if defined(__has_feature)
#define GYRE_FUZZ_FEATURE(name) __has_feature(name)
#else
#define GYRE_FUZZ_FEATURE(name) 0
#endif

namespace gyre::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    GYRE_FUZZ_FEATURE(address_sanitizer) || GYRE_FUZZ_FEATURE(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

class FuzzInput {
 public:
  explicit FuzzInput(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool empty() const { return at_ >= bytes_.size(); }
  uint8_t byte() { return empty() ? 0 : bytes_[at_++]; }
  uint64_t word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | byte();
    return word;
  }
  uint64_t below(uint64_t count) {  // count: 1 to 65536
    const uint64_t value = count <= 256 ? byte() : uint64_t{byte()} << 8 | byte();
    return value % count;
  }
  bool chance(uint64_t one_in) { return below(one_in) == 1; }
  template <class T, size_t N>
  T one_of(const std::array<T, N>& values) {
    return values[below(N)];
  }

  // Half of the calls are made as they should be; in the others, every eighth value is odd.
  void begin_call() {
    spoiling_ = chance(2);
    spoiled_ = false;
  }
  bool spoil() {
    const bool now = spoiling_ && chance(8);
    spoiled_ = spoiled_ || now;
    return now;
  }
  bool spoiled() const { return spoiled_; }  // something odd is in this call

  // Numbers that overflow when they are added, multiplied or cut. Those between 2^20 and 2^31 are
  // left out: what they count may be there, and would take minutes.
  uint64_t extreme() {
    constexpr std::array<uint64_t, 20> kExtremes = {0,
                                                    1,
                                                    2,
                                                    7,
                                                    9,
                                                    255,
                                                    256,
                                                    65537,
                                                    0x7FFFFFFF,
                                                    0x80000000,
                                                    0xFFFFFFFF,
                                                    0x100000000,
                                                    0x100000001,
                                                    uint64_t{1} << 40,
                                                    uint64_t{1} << 58,
                                                    uint64_t{1} << 62,
                                                    0x7FFFFFFFFFFFFFFF,
                                                    uint64_t{1} << 63,
                                                    ~uint64_t{7},
                                                    ~uint64_t{0}};
    return chance(4) ? word() | uint64_t{1} << 40 : one_of(kExtremes);
  }
  uint64_t number(uint64_t usual) {
    if (!spoil()) return usual;
    switch (below(4)) {
      case 0:
        return usual + 1;
      case 1:
        return usual - 1;  // of 0: the largest
      default:
        return extreme();
    }
  }
  // From -1 to 1; odd: what floats can also be.
  float real(float usual) {
    if (!spoil()) return usual;
    constexpr std::array<float, 9> kReals = {
        0.0f, -0.0f, -1.0f, 1e30f, -1e30f, 1e-40f, 1e-30f, __builtin_inff(), __builtin_nanf("")};
    return one_of(kReals);
  }

 private:
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
  bool spoiling_ = false, spoiled_ = false;
};

}  // namespace gyre::test
