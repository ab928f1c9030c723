#pragma once
// The emulated GPU with as many multiprocessors, and as much shared memory, as a test wants; and
// checks against double precision and against the CPU. CTest finds its driver by LD_LIBRARY_PATH.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "cuda/fake_controls.h"

namespace gyre::test {

constexpr cuda::CudaLimits kLarge{132, 227 << 10, 228 << 10, 90},
    kSmall{84, 99 << 10, 100 << 10, 86};
inline cuda::CudaLimits limits = kLarge;

// What fits is found out once for each device.
inline Device emulated_device(uint32_t multiprocessors = 1) {
  // Never destroyed: the driver, which was loaded later, would be gone.
  static auto& devices = *new std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Device>();
  const auto key = std::make_tuple(limits.shared_bytes_per_block, limits.arch, multiprocessors);
  if (const auto found = devices.find(key); found != devices.end()) return found->second;
  if (fake().limits == nullptr) throw std::runtime_error("ctest knows where the driver is");
  cuda::CudaLimits wanted = limits;
  wanted.multiprocessors = multiprocessors;
  fake().limits(&wanted);
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  fake().limits(nullptr);
  return devices.emplace(key, device).first->second;
}

inline uint64_t decode_calls() { return fake().launches("gyre::cuda::attention_decode<"); }
inline uint64_t many_rows_calls() { return fake().launches("gyre::cuda::attention_many_rows<"); }

// Queries over the keys and values of one KV head, one token of them.
inline AttentionInputs one_head(const Device& d, KvFormat format, const std::vector<float>& q,
                                const std::vector<float>& k, const std::vector<float>& v,
                                uint64_t dim) {
  const uint64_t heads = q.size() / dim;
  AttentionInputs in;
  in.q = tensor_of(d, q, {1, heads, dim});
  in.k_cache = cache_of(d, format, KvRole::k, k, {1, dim});
  in.v_cache = cache_of(d, format, KvRole::v, v, {1, dim});
  in.out = d.tensor(DType::f32, {1, heads, dim});
  return in;
}
inline std::vector<float> attended(const Device& d, const AttentionInputs& in,
                                   const AttentionOptions& options) {
  attention(RunNow(d), in, options);
  return floats_of(in.out);
}

inline void expect_holds(const AttentionCase& c, uint32_t multiprocessors = 1) {
  EXPECT_TRUE(attention_holds(emulated_device(multiprocessors), c));
}

// By attention_decode.
inline void expect_decoded(const AttentionCase& c, uint32_t multiprocessors = 1) {
  const uint64_t before = decode_calls();
  expect_holds(c, multiprocessors);
  EXPECT_EQ(decode_calls(), before + 1) << c.text();
}

}  // namespace gyre::test
