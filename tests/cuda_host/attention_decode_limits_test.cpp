// Decoding at its limits: strides of one row, the lowest logit, fewer warps, less room, the end of
// the cache, mixed pairs, types of queries and outputs, infinite values.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "attention_host_device.h"
#include "fibers/guarded.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

// A head dimension of one row may have any stride: no other row is there.
TEST(AttentionDecodeLimits, StrideOfOneHead) {
  constexpr uint64_t kDim = 64, kKeys = 70;
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    const auto on = [&](const Device& d, uint64_t stride) {
      AttentionInputs in =
          one_head(d, format, gaussian_rows(1, kDim, 3), gaussian_rows(kKeys, kDim, 1),
                   gaussian_rows(kKeys, kDim, 2), kDim);
      in.q = in.q.strided({1, 1, kDim}, {0, stride, 1});
      return attended(d, in, {.length = kKeys, .scale = 0.125f});
    };
    EXPECT_EQ(on(host_device(), uint64_t{1} << 54), on(host_device(), kDim)) << name(format);
  }
}

// The lowest finite logit: warps without keys weigh nothing.
TEST(AttentionDecodeLimits, LowestLogit) {
  constexpr uint64_t kDim = 64;
  const float most = std::numeric_limits<float>::max();
  // q k scale in base 2 is to be exactly -most.
  float scale = 0, key = 1;
  for (uint32_t m = 0; m < 1024 && scale == 0; ++m) {
    key = 1 + static_cast<float>(m) / 1024;
    float near = most / key / 1.44269504f;
    for (int i = 0; i < 3; ++i) near = std::nextafter(near, 0.0f);
    for (int i = 0; i < 6 && scale == 0; ++i, near = std::nextafter(near, most))
      if (near * 1.44269504f * 0x1p-7f * (key * 0x1p7f) == most) scale = near;
  }
  ASSERT_NE(scale, 0);
  std::vector<float> q(kDim), k(kDim);
  q[0] = 1, k[0] = -key;
  const std::vector<float> v = gaussian_rows(1, kDim, 7);
  const auto on = [&](const Device& d) {
    return attended(d, one_head(d, KvFormat::f16, q, k, v, kDim), {.length = 1, .scale = scale});
  };
  const std::vector<float> got = on(host_device()), wanted = on(cpu_device(1));
  EXPECT_LE(nmse({got.begin(), got.end()}, {wanted.begin(), wanted.end()}), 1e-6);
}

// tq4 beside 16-bit values, and the other way round: with few and with many rows.
TEST(AttentionDecodeLimits, MixedTq4) {
  for (const uint64_t heads : {3, 8, 16})
    expect_decoded(
        {.heads = heads, .k_dim = 128, .length = 300, .k = KvFormat::tq4, .v = KvFormat::f16});
  for (const uint64_t heads : {3, 8, 12})
    expect_decoded(
        {.heads = heads, .k_dim = 128, .length = 300, .k = KvFormat::f16, .v = KvFormat::tq4});
}

// Fewer warps than a block may have, and keys for one of them or for all; all of the scratch's
// shapes.
TEST(AttentionDecodeLimits, FewerWarps) {
  for (const cuda::CudaLimits& room : {cuda::CudaLimits{132, 34 << 10, 80 << 10, 90},
                                       cuda::CudaLimits{132, 48 << 10, 80 << 10, 90}}) {
    limits = room;
    for (const uint64_t length : {1, 40, 500})
      for (const KvFormat format : {KvFormat::f16, KvFormat::tq4})
        for (const uint64_t dim : {64, 128})
          expect_close({.heads = 3, .k_dim = dim, .length = length, .k = format, .v = format});
  }
  limits = kLarge;
}

// A GPU with less room gives fewer rows to a block, and the rest to further ones.
TEST(AttentionDecodeLimits, LessRoom) {
  limits = kSmall;
  for (const uint64_t heads : {8, 16})
    expect_decoded(
        {.heads = heads, .k_dim = 512, .length = 200, .k = KvFormat::tq4, .v = KvFormat::tq4});
  expect_decoded({.heads = 8, .k_dim = 512, .length = 200, .k = KvFormat::tq8, .v = KvFormat::tq8});
  limits = kLarge;
}

// A copy whose end lies at memory that cannot be read.
Tensor at_a_guard(const Device& d, const Tensor& t) {
  constexpr size_t kAlignment = 128;
  if (!t.defined()) return t;
  const Bytes bytes = read_bytes(t);
  const auto memory = std::make_shared<fibers::Guarded>();
  memory->resize((bytes.size() + kAlignment - 1) / kAlignment * kAlignment);
  unsigned char* const first = memory->end() - bytes.size();
  std::memcpy(first, bytes.data(), bytes.size());
  return d.wrap(first, t.dtype(), t.shape(), {}, memory);
}

// Nothing beyond the cache is read with the last tiles, nor with tiles that fill a stage without
// keys.
TEST(AttentionDecodeLimits, ReadsNothingBeyondTheCache) {
  constexpr uint64_t kDim = 128;
  const Device d = host_device();
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq3, KvFormat::tq4,
                                KvFormat::tq5, KvFormat::tq8}) {
    for (const uint64_t keys : {1, 8, 70, 104}) {
      AttentionInputs in =
          one_head(d, format, gaussian_rows(3, kDim, 3), gaussian_rows(keys, kDim, 1),
                   gaussian_rows(keys, kDim, 2), kDim);
      const uint32_t before = decode_calls;
      const std::vector<float> wanted = attended(d, in, {.length = keys, .scale = 0.1f});
      for (KvBuffer* const cache : {&in.k_cache, &in.v_cache}) {
        cache->codes = at_a_guard(d, cache->codes);
        cache->scales = at_a_guard(d, cache->scales);
      }
      EXPECT_EQ(attended(d, in, {.length = keys, .scale = 0.1f}), wanted) << name(format);
      EXPECT_EQ(decode_calls, before + 2) << name(format) << " " << keys;
    }
  }
}

// Queries and outputs of each type.
TEST(AttentionDecodeLimits, Types) {
  for (const DType q : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType out : {DType::f32, DType::f16, DType::bf16}) {
      const uint32_t before = decode_calls;
      for (const KvFormat format : {KvFormat::f16, KvFormat::tq4})
        expect_holds({.heads = 3,
                      .k_dim = 128,
                      .length = 100,
                      .k = format,
                      .v = format,
                      .q_dtype = q,
                      .out_dtype = out});
      EXPECT_EQ(decode_calls, before + 2);
    }
  }
}

TEST(AttentionDecodeLimits, MergedSeveralTokens) {
  for (const uint64_t tokens : {2, 3, 4})
    expect_decoded({.tokens = tokens,
                    .heads = 4,
                    .kv_heads = 2,
                    .k_dim = 128,
                    .length = 3000,
                    .k = KvFormat::tq4,
                    .v = KvFormat::tq4,
                    .sink_logits = true},
                   8);
}

// An infinite value of a warp whose keys are all quieter than another's, not so quiet that they
// weigh nothing.
TEST(AttentionDecodeLimits, InfiniteValueOfAQuietWarp) {
  constexpr uint64_t kDim = 64, kKeys = 200;
  std::vector<float> q = gaussian_rows(1, kDim, 5), k(kKeys * kDim), v(kKeys * kDim);
  float square = 0;
  for (const float x : q) square += x * x;
  for (uint64_t i = 0; i < k.size(); ++i) {
    k[i] = i / kDim < 64 ? -20 * q[i % kDim] / square : 0;
    v[i] = i / kDim == 5 ? 0.0f : q[i % kDim];
  }
  v[5 * kDim + 9] = 3e38f;  // its scale is infinite, that of an infinity NaN
  for (const uint64_t heads : {1, 12}) {
    const Device d = host_device();
    std::vector<float> queries;
    for (uint64_t i = 0; i < heads; ++i) queries.insert(queries.end(), q.begin(), q.end());
    const AttentionInputs in = one_head(d, KvFormat::tq4, queries, k, v, kDim);
    for (const float x : attended(d, in, {.length = kKeys, .scale = 1.0f}))
      EXPECT_FALSE(std::isfinite(x)) << x;
  }
}

}  // namespace
}  // namespace gyre::test
