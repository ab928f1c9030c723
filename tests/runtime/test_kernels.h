#pragma once
// Kernels for tests of the runtime: simple arithmetic on bytes, in as many tasks as the test asks
// for, one of them late if it likes. The order of two commands that touch the same bytes shows in
// the result.

#include "cpu/device.h"
#include "gyre_test.h"
#include "runtime/recorder.h"

namespace gyre::test {

constexpr uint64_t kMissingVariant = 99;  // a spec for which no device has code

struct TestSpec {
  uint64_t variant = 0;
};

struct BytesParams {
  uint64_t a_bytes = 0;
  uint64_t b_bytes = 0;
  uint64_t out_bytes = 0;
  uint32_t salt = 0;
  uint32_t tasks = 1;
  uint32_t slow_task = 0;
  uint32_t slow_ns = 0;
};

inline uint8_t mix_value(uint8_t a, uint8_t b, uint64_t i, uint32_t salt) {
  return static_cast<uint8_t>(a * 7 + b * 13 + i * 5 + salt);
}
inline uint8_t fold_value(uint8_t out, uint8_t a, uint64_t i, uint32_t salt) {
  return static_cast<uint8_t>(out * 3 + a + i + salt);
}

// out[i] = mix_value(a[i % a_bytes], b[i % b_bytes], i, salt); an operand without bytes reads as 0.
inline constexpr Kernel<TestSpec, BytesParams> kMix{
    "mix", {{"a", Access::read}, {"b", Access::read}, {"out", Access::write}}};

// out[i] = fold_value(out[i], a[i % a_bytes], i, salt)
inline constexpr Kernel<TestSpec, BytesParams> kFold{
    "fold", {{"a", Access::read}, {"out", Access::read_write}}};

// In no device's table.
inline constexpr Kernel<TestSpec, BytesParams> kAbsent{"absent", {}};

struct BytesCall {
  Tensor a, b, out;  // u8, [bytes]; undefined is absent
  uint32_t salt = 1;
  uint32_t tasks = 1;
  uint32_t slow_task = 0;
  uint32_t slow_ns = 0;
};

BytesParams params_of(const BytesCall& call);
void record_mix(Encoder& encoder, const BytesCall& call);
void record_fold(Encoder& encoder, const BytesCall& call);  // takes no b

// The CPU device with kMix and kFold instead of the library's kernels.
Device open_test_device(const DeviceOptions& options = {.threads = 2});

}  // namespace gyre::test
