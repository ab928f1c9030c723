// The CUDA attention kernels against double precision, on the host: a CPU device whose table has
// them in place of its own. Bounds are those of the CPU's kernels; every unused slot holds NaN.
#include "attention_host.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "attention_fixture.h"
#include "attention_small.h"
#include "cpu/device.h"
#include "cuda/kernels.h"

namespace gyre::test {
namespace {

constexpr cuda::CudaLimits kLarge{132, 227 << 10, 228 << 10, 90},
    kSmall{84, 99 << 10, 100 << 10, 86};
cuda::CudaLimits limits = kLarge;
uint32_t decoded = 0, clustered = 0;  // calls of attention_decode, and those as clusters

void launch(HostKernel kernel, const cuda::Launch& shape, const void* params,
            const uint64_t* args) {
  kernel(params, args, {shape.grid, shape.block, shape.shared_bytes});
}

void run_attention(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  launch(host_attention(p.k.format, p.v.format), cuda::launch_attention(params, 0, limits), params,
         args);
}

template <uint32_t kCluster>
void run_decode(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const auto rows = static_cast<uint32_t>(
      abi::attention_decode_rows(p.v.format, p.v.head_dim, p.tokens * (p.heads / p.kv_heads)));
  const abi::AttentionDecodeSpec spec = {static_cast<uint8_t>(p.k.format),
                                         static_cast<uint8_t>(p.v.format),
                                         static_cast<uint8_t>(rows),
                                         kCluster,
                                         {},
                                         static_cast<uint16_t>(p.k.head_dim)};
  ++decoded;
  if (kCluster > 1) ++clustered;
  launch(host_attention_decode(p.k.format, p.v.format, p.k.head_dim, rows, kCluster),
         cuda::launch_attention_decode(params, spec_key(spec), limits), params, args);
}

template <uint32_t kOut>
void run_merge(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch(host_attention_merge(kOut), cuda::launch_attention_merge(params, 0, limits), params, args);
}

cpu::TaskFn select_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  return host_attention(types.k_format, types.v_format) != nullptr ? run_attention : nullptr;
}

cpu::TaskFn select_decode(uint64_t spec) {
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(spec);
  if (host_attention_decode(s.k_format, s.v_format, s.head_dim, s.rows, s.cluster) == nullptr ||
      !cuda::fits_attention_decode(spec, limits))
    return nullptr;
  return s.cluster == 1 ? run_decode<1> : run_decode<abi::kAttentionCluster>;
}

cpu::TaskFn select_merge(uint64_t spec) {
  const uint32_t out = spec_from_key<abi::AttentionMergeSpec>(spec).out_dtype;
  return out == 0 ? run_merge<0> : (out == 1 ? run_merge<1> : run_merge<2>);
}

uint32_t one_task(const void*, uint64_t) { return 1; }

std::vector<cpu::CpuKernel> make_table() {
  const auto rows = cpu::kernel_table();
  std::vector<cpu::CpuKernel> table(rows.begin(), rows.end());
  for (cpu::CpuKernel& row : table) {
    if (row.info == &kAttention.info) row.select = select_attention, row.tasks = one_task;
    if (row.info == &kAttentionMerge.info) row.select = select_merge, row.tasks = one_task;
  }
  table.push_back({&kAttentionDecode.info, select_decode, one_task});
  return table;
}

// What fits is found out once for each device: one for each size of shared memory.
Device host_device(uint32_t threads = 1) {
  static const std::vector<cpu::CpuKernel> kTable = make_table();
  static std::map<std::pair<uint32_t, uint32_t>, Device> devices;
  const auto key = std::make_pair(limits.shared_bytes_per_block, threads);
  return devices.try_emplace(key, cpu::make_device({.threads = threads}, kTable)).first->second;
}

constexpr KvFormat kNative[] = {KvFormat::tq2, KvFormat::tq3, KvFormat::tq4,
                                KvFormat::tq5, KvFormat::tq6, KvFormat::tq8};
constexpr KvFormat kDense[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16};

void expect_holds(const AttentionCase& c) { EXPECT_TRUE(attention_holds(host_device(), c)); }

// Levels are exact: only queries and weights are rounded, to 16 bits.
void expect_close(const AttentionCase& c, uint32_t threads = 1) {
  const AttentionProblem problem(host_device(threads), c);
  const AttentionAnswer answer = problem.run();
  EXPECT_LE(nmse(answer.out, answer.decoded.out), 1e-6) << problem.numbers().text();
}

void expect_decoded(const AttentionCase& c, uint32_t threads = 1) {
  const uint32_t before = decoded;
  expect_close(c, threads);
  EXPECT_EQ(decoded, before + 1) << c.text();
}

TEST(CudaHostAttention, EveryNativeFormatAndOddDims) {
  for (const KvFormat format : kNative) {
    for (const uint64_t dim : {16, 56, 128, 200})
      expect_close({.heads = 4, .k_dim = dim, .length = 77, .k = format, .v = format});
  }
}

TEST(CudaHostAttention, EveryDenseFormatAndOddDims) {
  for (const KvFormat format : kDense) {
    for (const uint64_t dim : {24, 80, 128})
      expect_close({.heads = 4, .k_dim = dim, .length = 77, .k = format, .v = format});
  }
}

TEST(CudaHostAttention, CompatFormats) {
  expect_close({.k_dim = 64, .length = 37, .k = KvFormat::compat4, .v = KvFormat::compat4});
  expect_close({.k_dim = 512, .length = 9, .k = KvFormat::compat4, .v = KvFormat::compat4});
  for (const KvFormat format : {KvFormat::compat5, KvFormat::compat6, KvFormat::compat8})
    expect_close({.heads = 1, .k_dim = 256, .length = 20, .k = format, .v = format});
}

TEST(CudaHostAttention, PairsAndDifferentDims) {
  expect_close({.k_dim = 128, .v_dim = 64, .length = 70, .k = KvFormat::tq8, .v = KvFormat::tq4});
  expect_close({.k_dim = 64, .v_dim = 96, .length = 70, .k = KvFormat::f16, .v = KvFormat::tq3});
  expect_close({.k_dim = 96, .v_dim = 40, .length = 70, .k = KvFormat::tq6, .v = KvFormat::bf16});
  expect_close(
      {.k_dim = 40, .v_dim = 32, .length = 70, .k = KvFormat::f32, .v = KvFormat::compat4});
}

TEST(CudaHostAttention, LargeHeads) {
  expect_close({.heads = 2, .k_dim = 576, .v_dim = 512, .length = 40});
  expect_close({.heads = 2, .k_dim = 1024, .length = 20, .k = KvFormat::tq4, .v = KvFormat::tq4});
  expect_close({.heads = 9, .k_dim = 1016, .length = 20, .k = KvFormat::tq5, .v = KvFormat::tq5});
  expect_close({.heads = 1, .k_dim = 1024, .length = 20, .k = KvFormat::f32, .v = KvFormat::f32});
}

TEST(CudaHostAttention, EveryRatioAndManyRows) {
  for (const uint64_t heads : {1, 3, 7, 16})
    expect_close(
        {.heads = heads, .k_dim = 64, .length = 30, .k = KvFormat::tq4, .v = KvFormat::tq4});
  expect_close({.tokens = 9, .heads = 8, .kv_heads = 2, .k_dim = 32, .length = 50});
  expect_close({.tokens = 21,
                .heads = 1,
                .k_dim = 32,
                .length = 21,
                .k = KvFormat::bf16,
                .v = KvFormat::bf16});
}

TEST(CudaHostAttention, MasksRingsAndTrees) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq4, KvFormat::f32}) {
    expect_holds({.tokens = 3,
                  .heads = 4,
                  .kv_heads = 2,
                  .k_dim = 64,
                  .length = 100,
                  .capacity = 107,
                  .ring_start = 70,
                  .k = format,
                  .v = format,
                  .window = 40,
                  .soft_cap = 20,
                  .sinks = true,
                  .slopes = true});
    expect_holds({.tokens = 4,
                  .heads = 2,
                  .k_dim = 32,
                  .length = 70,
                  .k = format,
                  .v = format,
                  .tree = true});
  }
  expect_holds({.tokens = 3, .k_dim = 32, .length = 40, .causal = false, .window = 9});
}

// Few rows and head dims of 64, 128, 256 and 512: attention_decode.
TEST(CudaHostAttention, Decoding) {
  constexpr std::pair<KvFormat, std::array<uint64_t, 4>> kDims[] = {
      {KvFormat::f16, {64, 128, 256}},      {KvFormat::bf16, {64, 128, 512}},
      {KvFormat::tq2, {64, 128, 512}},      {KvFormat::tq3, {128, 256, 512}},
      {KvFormat::tq4, {64, 128, 256, 512}}, {KvFormat::tq5, {128, 256}},
      {KvFormat::tq6, {64, 128, 512}},      {KvFormat::tq8, {64, 128, 256, 512}}};
  for (const auto& [format, dims] : kDims) {
    for (const uint64_t dim : dims) {
      if (dim == 0) continue;
      expect_decoded(
          {.heads = 6, .kv_heads = 2, .k_dim = dim, .length = 531, .k = format, .v = format});
    }
    expect_holds({.heads = 8,
                  .k_dim = 128,
                  .length = 400,
                  .capacity = 411,
                  .ring_start = 270,
                  .k = format,
                  .v = format,
                  .window = 333,
                  .sinks = true,
                  .splits = 2});
  }
  expect_decoded({.k_dim = 128, .length = 300, .k = KvFormat::f16, .v = KvFormat::tq3});
  expect_decoded({.k_dim = 256, .length = 300, .k = KvFormat::tq6, .v = KvFormat::bf16});
  expect_decoded({.k_dim = 64, .length = 300, .k = KvFormat::tq8, .v = KvFormat::tq4});
}

TEST(CudaHostAttention, DecodingEveryRatioAndSeveralTokens) {
  for (const uint64_t heads : {1, 2, 3, 4, 5, 7, 8, 12, 16}) {
    expect_decoded({.heads = heads, .length = 70, .k = KvFormat::tq4, .v = KvFormat::tq4});
    expect_decoded({.heads = heads, .length = 70});
  }
  for (const uint64_t tokens : {2, 3, 4})
    expect_decoded(
        {.tokens = tokens, .heads = 2, .length = 90, .k = KvFormat::tq8, .v = KvFormat::tq8});
  const AttentionCase masked = {.tokens = 2,
                                .heads = 4,
                                .length = 200,
                                .capacity = 216,
                                .ring_start = 77,
                                .k = KvFormat::tq4,
                                .v = KvFormat::tq4,
                                .window = 97,
                                .soft_cap = 20,
                                .sinks = true,
                                .slopes = true};
  const uint32_t before = decoded;
  expect_holds(masked);
  AttentionCase sharp = {.heads = 8, .length = 300, .k = KvFormat::tq8, .v = KvFormat::tq4};
  sharp.q_gain = 8;
  expect_holds(sharp);
  EXPECT_EQ(decoded, before + 2);
}

// The last block of a head finds what the others left, and leaves the counters as they were.
TEST(CudaHostAttention, DecodingMergesSplits) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
    expect_decoded({.heads = 4, .kv_heads = 2, .length = 3000, .k = format, .v = format}, 8);
    expect_decoded({.heads = 5, .length = 2049, .k = format, .v = format, .sinks = true}, 8);
  }
  const Device d = host_device(8);
  constexpr uint64_t kKeys = 2500, kDim = 64;
  AttentionInputs in;
  in.q = tensor_of(d, gaussian_rows(2, kDim, 3), {1, 2, kDim});
  in.k_cache = cache_of(d, KvFormat::tq8, KvRole::k, gaussian_rows(kKeys, kDim, 1), {1, kDim});
  in.v_cache = cache_of(d, KvFormat::tq8, KvRole::v, gaussian_rows(kKeys, kDim, 2), {1, kDim});
  in.out = d.tensor(DType::f32, {1, 2, kDim});
  Encoder encoder(d);
  attention(encoder, in, {.length = kKeys, .scale = 0.125f});
  const Graph graph = encoder.instantiate();
  graph.replay().wait();
  const std::vector<float> once = floats_of(in.out);
  in.out.write_from(std::span<const float>(std::vector<float>(2 * kDim, 7.0f)));
  graph.replay().wait();
  EXPECT_EQ(floats_of(in.out), once);
}

// The blocks of a cluster find what the others have; some of them have no keys.
TEST(CudaHostAttention, DecodingInClusters) {
  const uint32_t before = clustered;
  for (const uint64_t length : {1030, 1300, 1777, 2500}) {
    for (const uint64_t heads : {3, 11})
      expect_decoded(
          {.heads = heads, .k_dim = 64, .length = length, .k = KvFormat::tq4, .v = KvFormat::tq4},
          8);
    expect_decoded({.heads = 4, .k_dim = 64, .length = length, .sinks = true}, 8);
  }
  expect_decoded({.heads = 4,
                  .k_dim = 128,
                  .length = 1700,
                  .capacity = 1711,
                  .ring_start = 270,
                  .k = KvFormat::tq8,
                  .v = KvFormat::tq4,
                  .window = 1633},
                 8);
  EXPECT_EQ(clustered, before + 13);
}

TEST(CudaHostAttention, SplitsAndEmptyOnes) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4, KvFormat::compat4}) {
    expect_holds({.tokens = 2,
                  .k_dim = 32,
                  .length = 150,
                  .k = format,
                  .v = format,
                  .sinks = true,
                  .splits = 2});
    expect_holds({.k_dim = 32, .length = 5, .k = format, .v = format, .splits = 3});
  }
  expect_holds({.k_dim = 32, .length = 0, .sinks = true});
  expect_holds({.k_dim = 32, .length = 0});
  expect_holds({.tokens = 6, .heads = 2, .k_dim = 32, .length = 3});
}

TEST(CudaHostAttention, QueriesAndOutputsOfEveryType) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const uint64_t splits : {0, 2}) {
      expect_holds(
          {.k_dim = 32, .length = 20, .q_dtype = dtype, .out_dtype = dtype, .splits = splits});
    }
  }
}

TEST(CudaHostAttention, SharpQueriesAndOutliers) {
  expect_holds({.k_dim = 128, .length = 300, .q_gain = 8});
  expect_holds({.k_dim = 128, .length = 300, .k = KvFormat::tq8, .v = KvFormat::tq4, .q_gain = 8});
  expect_holds({.k_dim = 64,
                .length = 100,
                .k = KvFormat::bf16,
                .v = KvFormat::bf16,
                .q_gain = 8,
                .outliers = 4});
}

// What only the newest query sees must show there and nowhere else.
TEST(CudaHostAttention, WhatIsNotFiniteStaysWithItsRow) {
  constexpr uint64_t kKeys = 20;
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq4,
                                KvFormat::tq8, KvFormat::compat4}) {
    for (const uint64_t kDim : {32, 64})
      for (const bool in_key : {false, true}) {
        const Device d = host_device();
        std::vector<float> k = gaussian_rows(kKeys, kDim, 1), v = gaussian_rows(kKeys, kDim, 2);
        (in_key ? k : v)[kKeys * kDim - 3] = std::numeric_limits<float>::quiet_NaN();
        AttentionInputs in;
        in.q = tensor_of(d, gaussian_rows(2, kDim, 3), {2, 1, kDim});
        in.k_cache = cache_of(d, format, KvRole::k, k, {1, kDim});
        in.v_cache = cache_of(d, format, KvRole::v, v, {1, kDim});
        in.out = d.tensor(DType::f32, {2, 1, kDim});
        in.lse = d.tensor(DType::f32, {2, 1});
        Encoder encoder(d);
        attention(encoder, in, {.length = kKeys, .scale = 0.2f});
        encoder.submit().wait();
        const Small::Answer answer{floats_of(in.out), floats_of(in.lse)};
        EXPECT_TRUE(answer.finite(0, kDim)) << name(format) << " key " << in_key;
        EXPECT_FALSE(answer.finite(1, kDim)) << name(format) << " key " << in_key;
      }
  }
}

// Of queries, keys and values that are multiplied with numbers near the ends of what a format
// holds.
std::vector<float> decode_scaled(KvFormat format, float q_scale, float k_scale, float v_scale) {
  constexpr uint64_t kDim = 64, kKeys = 300, kHeads = 3;
  const Device d = host_device();
  const auto scaled = [](std::vector<float> rows, float by) {
    for (float& x : rows) x *= by;
    return rows;
  };
  AttentionInputs in;
  in.q = tensor_of(d, scaled(gaussian_rows(kHeads, kDim, 3), q_scale), {1, kHeads, kDim});
  in.k_cache =
      cache_of(d, format, KvRole::k, scaled(gaussian_rows(kKeys, kDim, 1), k_scale), {1, kDim});
  in.v_cache =
      cache_of(d, format, KvRole::v, scaled(gaussian_rows(kKeys, kDim, 2), v_scale), {1, kDim});
  in.out = d.tensor(DType::f32, {1, kHeads, kDim});
  Encoder encoder(d);
  attention(encoder, in, {.length = kKeys, .scale = 0.125f});
  encoder.submit().wait();
  std::vector<float> out = floats_of(in.out);
  for (float& x : out) x /= v_scale;
  return out;
}

TEST(CudaHostAttention, DecodingNumbersOfEverySize) {
  const auto expect_same = [](KvFormat format, float q, float k, float v) {
    const std::vector<float> plain = decode_scaled(format, 1, 1, 1);
    const std::vector<float> scaled = decode_scaled(format, q, k, v);
    EXPECT_LE(nmse({scaled.begin(), scaled.end()}, {plain.begin(), plain.end()}), 1e-4)
        << name(format) << " " << q << " " << k << " " << v;
  };
  for (const KvFormat format : {KvFormat::tq4, KvFormat::tq8}) {
    for (const float v : {1e-30f, 1e-20f, 1e20f, 1e29f, 5e29f}) expect_same(format, 1, 1, v);
    expect_same(format, 1e-25f, 1e25f, 1);
    expect_same(format, 1e25f, 1e-25f, 1);
  }
  expect_same(KvFormat::bf16, 1e-33f, 1e33f, 1e30f);
  expect_same(KvFormat::bf16, 1e30f, 1e-30f, 1e-30f);
}

// Windows are far larger than what there is; rows whose token is not in the cache see nothing.
TEST(CudaHostAttention, DecodingWindowsOfEverySize) {
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

// Everything that attention gives over a cache that grows by these numbers of tokens.
std::vector<float> attended(const Device& d, const KvCacheOptions& config, uint64_t heads,
                            std::initializer_list<uint64_t> steps) {
  const uint64_t kv_heads = config.kv_heads, dim = config.head_dim;
  KvCache cache(d, config);
  std::vector<float> all;
  for (const uint64_t tokens : steps) {
    const auto seed = static_cast<uint32_t>(tokens);
    const auto rows = [&](uint64_t count, uint32_t more) {
      return tensor_of(d, gaussian_rows(tokens * count, dim, seed + more), {tokens, count, dim});
    };
    const Tensor k = rows(kv_heads, 0), v = rows(kv_heads, 50), q = rows(heads, 99);
    const Tensor out = d.tensor(DType::f32, {tokens, heads, dim});
    Encoder encoder(d);
    cache.extend(encoder, tokens);
    for (uint64_t layer = 0; layer < config.layers.size(); ++layer) {
      cache.append(encoder, layer, k, v);
      cache.attend(encoder, layer, {.q = q, .out = out}, {.scale = 0.2f});
      encoder.submit().wait();
      const std::vector<float> values = floats_of(out);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

void expect_attended(const Device& d, const KvCacheOptions& config, uint64_t heads,
                     std::initializer_list<uint64_t> steps) {
  const std::vector<float> wanted = attended(cpu_device(1), config, heads, steps);
  const std::vector<float> got = attended(d, config, heads, steps);
  EXPECT_LE(nmse({got.begin(), got.end()}, {wanted.begin(), wanted.end()}), 1e-6);
}

// Lengths from device memory, and the three places of a layer's keys.
TEST(CudaHostAttention, CacheThatGrows) {
  expect_attended(host_device(),
                  {.kv_heads = 2,
                   .head_dim = 32,
                   .capacity = 100,
                   .layers = {{.tail = 16, .sinks = 3}, {.window = 12}}},
                  4, {2, 30, 1, 3});
}

// Layers of different formats have one scratch; one of them takes clusters.
TEST(CudaHostAttention, CacheThatGrowsInClusters) {
  const uint32_t before = clustered;
  expect_attended(host_device(8),
                  {.kv_heads = 1,
                   .head_dim = 64,
                   .capacity = 1200,
                   .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq4},
                              {.k = KvFormat::tq8, .v = KvFormat::tq8},
                              {.k = KvFormat::tq4, .v = KvFormat::tq4}}},
                  3, {1, 40, 1, 100, 1});
  EXPECT_EQ(clustered, before + 6);
}

// Shared memory decides about chunks, stages and rows of a block; every choice gives the answer.
TEST(CudaHostAttention, EverySizeOfSharedMemory) {
  for (const uint32_t kilobytes : {14, 22, 32, 48, 100}) {
    limits = {132, kilobytes << 10, 4 * (kilobytes + 1) << 10, 90};
    for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
      expect_close({.heads = 12, .k_dim = 64, .length = 150, .k = format, .v = format});
      if (kilobytes == 14) continue;  // nothing fits
      expect_close({.heads = 3, .k_dim = 128, .length = 150, .k = format, .v = format});
    }
  }
  limits = kSmall;
  expect_close({.heads = 12, .k_dim = 512, .length = 50});
  expect_close({.heads = 2, .k_dim = 256, .length = 70, .k = KvFormat::tq8, .v = KvFormat::tq8});
  limits = kLarge;
  expect_close({.heads = 2, .k_dim = 128, .length = 400, .k = KvFormat::tq4, .v = KvFormat::tq4});
}

}  // namespace
}  // namespace gyre::test
