// The bytes of calibrated rows, as checksums: they are a file format. kv_calibrated_cases compares
// with the documented arithmetic; these numbers do not change with it.
#include <gtest/gtest.h>

#include "format_classes.h"
#include "kv_codec/kv_codec_fixture.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 2, kTokens = 6;

// From integers alone, so that no library's random numbers matter.
class Numbers {
 public:
  explicit Numbers(uint32_t seed) : state_(seed) {}
  // From -1 to 1.
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 8) - (1 << 23)) * 0x1p-23f;
  }

 private:
  uint32_t state_;
};

// spread: a power of two, so that nothing depends on how compilers contract.
Tensor numbers(const Device& device, const Dims& shape, uint32_t seed, float spread) {
  Numbers random(seed);
  std::vector<float> values(device.tensor(DType::f32, shape).elements());
  for (float& value : values) value = random.next() * spread;
  return tensor_of(device, values, shape);
}

Tensor near_one(const Device& device, uint64_t n, uint32_t seed) {
  const Tensor made = numbers(device, {kHeads, n, n}, seed, 0.5f / static_cast<float>(n));
  std::vector<float> values = floats_of(made);
  for (size_t i = 0; i < values.size(); ++i)
    if (i / n % n == i % n) values[i] += 1;
  return tensor_of(device, values, made.shape());
}

void add_bytes(const Tensor& tensor, uint64_t& hash) {
  for (const uint8_t byte : bytes_of(tensor)) hash = (hash ^ byte) * 0x100000001B3u;  // FNV-1a
}

uint64_t bits_of(const Device& device, uint64_t n) {
  std::vector<float> diagonal = floats_of(numbers(device, {kHeads, n}, 5, 0.25f));
  for (float& value : diagonal) value += 1;
  const KvCalibration calibration{
      {near_one(device, n, 1), near_one(device, n, 2), numbers(device, {kHeads, n}, 3, 0.5f)},
      {numbers(device, {kHeads, n, n}, 4, 0.125f),
       tensor_of(device, diagonal, {kHeads, n}),
       {0.9f, 1.0f, 1.1f, 1.05f}}};
  const Tensor rows = numbers(device, {kTokens, kHeads, n}, 6, 4.0f);
  uint64_t hash = 0xCBF29CE484222325u;
  for (const KvFormat format : formats_of(FormatClass::levels)) {
    for (const bool transform : {true, false}) {
      KvCalibration given = calibration;
      if (!transform) given.transform = {};
      const KvBuffer k = KvBuffer::allocate(device, {format, KvRole::k, kHeads, 8, n});
      const KvBuffer v = KvBuffer::allocate(device, {format, KvRole::v, kHeads, 8, n});
      kv_quantize(RunNow(device), {.k = rows,
                                   .k_cache = k,
                                   .v = rows,
                                   .v_cache = v,
                                   .k_calibration = given,
                                   .v_calibration = given});
      for (const KvBuffer& cache : {k, v})
        add_bytes(cache.codes, hash), add_bytes(cache.scales, hash);
    }
  }
  return hash;
}

TEST(KvCalibratedBits, AreThoseOfFiles) {
  struct {
    uint64_t head_dim, hash;
  } const kKnown[] = {{16, 0xbfe50f7a5a66dc3b},  {32, 0xda7eabf317d7d5f8},
                      {64, 0x1b6848227ba9a9a4},  {128, 0x6caedad349111297},
                      {256, 0x7f4c6c7cefc9bce7}, {512, 0x16943240229e4809}};
  const Device device = Device::open("cpu");
  for (const auto& known : kKnown)
    EXPECT_EQ(bits_of(device, known.head_dim), known.hash)
        << known.head_dim << " " << std::hex << bits_of(device, known.head_dim);
}

}  // namespace
}  // namespace gyre::test
