// Attention at its limits on the emulated GPU: the lowest logit, other sizes of shared memory, more
// splits than are reduced at a time, the end of the cache, keys and values that are not finite.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cuda_host/emulated_device.h"
#include "fibers/guarded.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

// The lowest finite logit: warps without keys weigh nothing.
TEST(AttentionLimits, LowestLogit) {
  constexpr uint64_t kDim = 64;
  const float max = std::numeric_limits<float>::max();
  // q k scale in base 2 is to be exactly -most.
  float scale = 0, key = 1;
  for (uint32_t m = 0; m < 1024 && scale == 0; ++m) {
    key = 1 + static_cast<float>(m) / 1024;
    float near = max / key / 1.44269504f;
    for (int i = 0; i < 3; ++i) near = std::nextafter(near, 0.0f);
    for (int i = 0; i < 6 && scale == 0; ++i, near = std::nextafter(near, max))
      if (near * 1.44269504f * 0x1p-7f * (key * 0x1p7f) == max) scale = near;
  }
  ASSERT_NE(scale, 0);
  std::vector<float> q(kDim), k(kDim);
  q[0] = 1, k[0] = -key;
  const std::vector<float> v = gaussian_rows(1, kDim, 7);
  const auto on = [&](const Device& d) {
    return attended(d, one_head(d, KvFormat::f16, q, k, v, kDim), {.length = 1, .scale = scale});
  };
  const std::vector<float> got = on(emulated_device()), wanted = on(cpu_device(1));
  EXPECT_LE(nmse({got.begin(), got.end()}, {wanted.begin(), wanted.end()}), 1e-6);
}

// Fewer warps than a block may have, and keys for one of them or for all; all of the scratch's
// shapes.
TEST(AttentionLimits, FewerWarps) {
  for (const cuda::CudaLimits& room : {cuda::CudaLimits{132, 34 << 10, 80 << 10, 90},
                                       cuda::CudaLimits{132, 48 << 10, 80 << 10, 90}}) {
    limits = room;
    for (const uint64_t length : {1, 40, 500})
      for (const KvFormat format : {KvFormat::f16, KvFormat::tq4})
        for (const uint64_t dim : {64, 128})
          expect_holds({.heads = 3, .k_dim = dim, .length = length, .k = format, .v = format});
  }
  limits = kLarge;
}

// A GPU with less room gives fewer rows to a block, and the rest to further ones.
TEST(AttentionLimits, LessRoom) {
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
  fake().own(reinterpret_cast<uint64_t>(first), bytes.size());
  std::memcpy(first, bytes.data(), bytes.size());
  return d.wrap(first, t.dtype(), t.shape(), {}, memory);
}

// Nothing beyond the cache is read with the last tiles, nor with tiles that fill a stage without
// keys.
TEST(AttentionLimits, ReadsNothingBeyondTheCache) {
  constexpr uint64_t kDim = 128;
  const Device d = emulated_device();
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq3, KvFormat::tq4,
                                KvFormat::tq5, KvFormat::tq8}) {
    for (const uint64_t keys : {1, 8, 70, 104}) {
      AttentionInputs in =
          one_head(d, format, gaussian_rows(3, kDim, 3), gaussian_rows(keys, kDim, 1),
                   gaussian_rows(keys, kDim, 2), kDim);
      const uint64_t before = decode_calls();
      const std::vector<float> wanted = attended(d, in, {.length = keys, .scale = 0.1f});
      for (KvBuffer* const cache : {&in.k_cache, &in.v_cache}) {
        cache->codes = at_a_guard(d, cache->codes);
        cache->scales = at_a_guard(d, cache->scales);
      }
      EXPECT_EQ(attended(d, in, {.length = keys, .scale = 0.1f}), wanted) << name(format);
      EXPECT_EQ(decode_calls(), before + 2) << name(format) << " " << keys;
    }
  }
}

// An infinite value of a warp whose keys are all quieter than another's, not so quiet that they
// weigh nothing.
TEST(AttentionLimits, InfiniteValueOfAQuietWarp) {
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
    const Device d = emulated_device();
    std::vector<float> queries;
    for (uint64_t i = 0; i < heads; ++i) queries.insert(queries.end(), q.begin(), q.end());
    const AttentionInputs in = one_head(d, KvFormat::tq4, queries, k, v, kDim);
    for (const float x : attended(d, in, {.length = kKeys, .scale = 1.0f}))
      EXPECT_FALSE(std::isfinite(x)) << x;
  }
}

// A key with an infinite coordinate counts nothing in rows where its score is below all others, and
// makes those where it is above, or none, NaN: as on the CPU. The rows' coordinate there has two
// 16-bit parts, one, none that f16 holds beside the others, or is 0; levels, of which a key's scale
// is infinite, meet it rounded.
void expect_infinite_key(KvFormat format, float coordinate, uint64_t dim, uint64_t rows = 8) {
  constexpr uint64_t kKeys = 100, kAt = 3;
  constexpr std::array kQueries = {0.3f, -0.3f, 0.5f, -0.5f, 1e-13f, -1e-13f, 0.7f, 0.0f};
  std::vector<float> queries = gaussian_rows(rows, dim, 3), keys = gaussian_rows(kKeys, dim, 1);
  for (uint64_t i = 0; i < rows && std::isinf(coordinate); ++i)
    queries[i * dim + kAt] = kQueries[i % kQueries.size()];
  keys[50 * dim + kAt] = coordinate;
  const auto attend_on = [&](const Device& d) {
    AttentionInputs in = one_head(d, format, queries, keys, gaussian_rows(kKeys, dim, 2), dim);
    in.lse = d.tensor(DType::f32, {1, rows});
    const std::vector<float> values = attended(d, in, {.length = kKeys, .scale = 0.1f});
    return std::make_pair(values, floats_of(in.lse));
  };
  const auto [out, lse] = attend_on(emulated_device());
  const auto [wanted, wanted_lse] = attend_on(cpu_device(1));
  std::vector<double> finite, wanted_finite;
  for (uint64_t i = 0; i < rows; ++i) {
    EXPECT_EQ(std::isnan(lse[i]), std::isnan(wanted_lse[i]))
        << name(format) << " head_dim " << dim << " row " << i;
    if (std::isnan(wanted_lse[i])) continue;
    for (uint64_t c = i * dim; c < (i + 1) * dim; ++c)
      finite.push_back(out[c]), wanted_finite.push_back(wanted[c]);
  }
  EXPECT_FALSE(finite.empty());
  EXPECT_LE(nmse(finite, wanted_finite), 1e-5) << name(format) << " head_dim " << dim;
}

TEST(AttentionLimits, KeysOfInfiniteLength) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const uint64_t dim : {64, 512}) expect_infinite_key(KvFormat::tq4, -3e38f, dim);
  for (const float coordinate : {-kInfinity, kInfinity}) {
    for (const KvFormat format : {KvFormat::f16, KvFormat::bf16})
      for (const uint64_t dim : {64, 128, 512}) expect_infinite_key(format, coordinate, dim);
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16})
      expect_infinite_key(format, coordinate, 80);
    expect_infinite_key(KvFormat::f16, coordinate, 128, 16);
  }
}

// Shared memory decides about chunks, stages and rows of a block; every choice gives the answer.
TEST(AttentionLimits, EverySizeOfSharedMemory) {
  for (const uint32_t kilobytes : {14, 22, 32, 48, 100}) {
    limits = {132, kilobytes << 10, 4 * (kilobytes + 1) << 10, 90};
    for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
      expect_holds({.heads = 12, .k_dim = 64, .length = 150, .k = format, .v = format});
      if (kilobytes == 14) continue;  // nothing fits
      expect_holds({.heads = 3, .k_dim = 128, .length = 150, .k = format, .v = format});
    }
  }
  limits = kLarge;
}

// More splits, and pairs of them, than are reduced at a time: by two, and by one.
TEST(AttentionLimits, ManySplits) {
  for (const uint32_t splits : {34u, 17u})
    expect_decoded(
        {.heads = 2, .k_dim = 64, .length = splits * 128, .k = KvFormat::tq8, .v = KvFormat::tq8},
        splits);
  for (const uint32_t splits : {20u, 18u})
    expect_decoded(
        {.heads = 12, .k_dim = 128, .length = splits * 128, .k = KvFormat::tq4, .v = KvFormat::tq4},
        splits);
}

// Windows are far larger than what there is; rows whose token is not in the cache see nothing.
TEST(AttentionLimits, WindowsOfEverySize) {
  for (const uint64_t window : {uint64_t{1} << 31, (uint64_t{1} << 31) - 1, ~uint64_t{0} >> 1}) {
    for (const uint64_t length : {1, 3, 40}) {
      expect_holds({.tokens = 4,
                    .heads = 2,
                    .k_dim = 128,
                    .length = length,
                    .k = KvFormat::tq8,
                    .v = KvFormat::tq8,
                    .window = window});
    }
  }
}

// Values of later tokens that are infinite or NaN must not show in the rows before them.
TEST(AttentionLimits, ManyRowsBesideValuesThatAreNotFinite) {
  constexpr uint64_t kTokens = 40, kHeads = 4, kLength = 140, kDim = 64;
  std::vector<float> values = gaussian_rows(kLength, kDim, 2);
  values[110 * kDim + 3] = std::numeric_limits<float>::infinity();
  values[111 * kDim + 3] = -std::numeric_limits<float>::infinity();
  values[120 * kDim + 7] = -std::numeric_limits<float>::infinity();
  for (uint64_t c = 0; c < kDim; ++c)
    values[135 * kDim + c] = std::numeric_limits<float>::quiet_NaN();
  const auto attend_on = [&](const Device& d) {
    AttentionInputs in;
    in.q = d.tensor(DType::f16, {kTokens, kHeads, kDim});
    kv_copy(RunNow(d),
            {.k = tensor_of(d, gaussian_rows(kTokens * kHeads, kDim, 3), {kTokens, kHeads, kDim}),
             .k_cache = in.q});
    in.k_cache = cache_of(d, KvFormat::f16, KvRole::k, gaussian_rows(kLength, kDim, 1), {1, kDim});
    in.v_cache = cache_of(d, KvFormat::f16, KvRole::v, values, {1, kDim});
    in.out = d.tensor(DType::f32, {kTokens, kHeads, kDim});
    return attended(d, in, {.length = kLength, .scale = 0.1f});
  };
  const uint64_t before = many_rows_calls();
  const std::vector<float> got = attend_on(emulated_device()), wanted = attend_on(cpu_device(1));
  EXPECT_EQ(many_rows_calls(), before + 1);
  std::vector<double> finite, wanted_finite;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(std::isnan(got[i]), std::isnan(wanted[i])) << "element " << i;
    EXPECT_EQ(std::isinf(got[i]), std::isinf(wanted[i])) << "element " << i;
    if (std::isfinite(wanted[i])) finite.push_back(got[i]), wanted_finite.push_back(wanted[i]);
  }
  EXPECT_GT(finite.size(), got.size() / 2);
  EXPECT_LT(finite.size(), got.size());
  EXPECT_LE(nmse(finite, wanted_finite), 1e-5);
}

// attention_many_rows has other blocks there.
TEST(AttentionLimits, ManyRowsOnOtherGpus) {
  const auto expect_many_rows = [](const AttentionCase& c) {
    const uint64_t before = many_rows_calls();
    expect_holds(c);
    EXPECT_GT(many_rows_calls(), before) << c.text();
  };
  const AttentionCase levels{
      .tokens = 20, .heads = 4, .length = 200, .k = KvFormat::tq4, .v = KvFormat::tq4};
  AttentionCase wide = levels;
  wide.k_dim = 256;
  limits = {108, 163 << 10, 164 << 10, 80};
  expect_many_rows({.tokens = 40, .heads = 4, .k_dim = 64, .length = 200, .q_dtype = DType::f16});
  expect_many_rows(wide);
  limits = kSmall;
  expect_many_rows(
      {.tokens = 20, .heads = 4, .k_dim = 192, .v_dim = 128, .length = 200, .q_dtype = DType::f16});
  expect_many_rows(levels);
  limits = kLarge;
}

}  // namespace
}  // namespace gyre::test
