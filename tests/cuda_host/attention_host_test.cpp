// The CUDA attention kernels against double precision, on the host: a CPU device whose table has
// them in place of its own. Bounds are those of the CPU's kernels; every unused slot holds NaN.
#include "attention_host_device.h"
#include "format_classes.h"

namespace gyre::test {
namespace {

constexpr KvFormat kDense[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16};

TEST(CudaHostAttention, EveryNativeFormatAndOddDims) {
  for (const KvFormat format : native_formats()) {
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

TEST(CudaHostAttention, MlxNativeFormats) {
  expect_close({.k_dim = 64, .length = 37, .k = KvFormat::mlx_native4, .v = KvFormat::mlx_native4});
  expect_close({.k_dim = 512, .length = 9, .k = KvFormat::mlx_native4, .v = KvFormat::mlx_native4});
  expect_close(
      {.k_dim = 1024, .length = 9, .k = KvFormat::mlx_native4, .v = KvFormat::mlx_native4});
  for (const KvFormat format : {KvFormat::mlx_native4, KvFormat::mlx_native6})
    expect_close({.k_dim = 512, .length = 9, .k = format, .v = format, .scale_factor = 0.7f});
  for (const KvFormat format :
       {KvFormat::mlx_native5, KvFormat::mlx_native6, KvFormat::mlx_native8})
    expect_close({.heads = 1, .k_dim = 256, .length = 20, .k = format, .v = format});
}

TEST(CudaHostAttention, PairsAndDifferentDims) {
  expect_close({.k_dim = 128, .v_dim = 64, .length = 70, .k = KvFormat::tq8, .v = KvFormat::tq4});
  expect_close({.k_dim = 64, .v_dim = 96, .length = 70, .k = KvFormat::f16, .v = KvFormat::tq3});
  expect_close({.k_dim = 96, .v_dim = 40, .length = 70, .k = KvFormat::tq6, .v = KvFormat::bf16});
  expect_close(
      {.k_dim = 40, .v_dim = 32, .length = 70, .k = KvFormat::f32, .v = KvFormat::mlx_native4});
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
                  .sink_logits = true,
                  .alibi_slopes = true});
    expect_holds({.tokens = 4,
                  .heads = 2,
                  .k_dim = 32,
                  .length = 70,
                  .k = format,
                  .v = format,
                  .tree_mask = true});
  }
  expect_holds({.tokens = 3, .k_dim = 32, .length = 40, .causal = false, .window = 9});
}

TEST(CudaHostAttention, SplitsAndEmptyOnes) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4, KvFormat::mlx_native4}) {
    expect_holds({.tokens = 2,
                  .k_dim = 32,
                  .length = 150,
                  .k = format,
                  .v = format,
                  .sink_logits = true,
                  .splits = 2});
    expect_holds({.k_dim = 32, .length = 5, .k = format, .v = format, .splits = 3});
  }
  expect_holds({.k_dim = 32, .length = 0, .sink_logits = true});
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

TEST(CudaHostAttention, KeysOfInfiniteLength) {
  for (const KvFormat format : kDense) {
    expect_infinite_key(format, kMinusInfinity, 80);
    expect_infinite_key(format, -kMinusInfinity, 80);
  }
}

// What only the newest query sees must show there and nowhere else.
TEST(CudaHostAttention, WhatIsNotFiniteStaysWithItsRow) {
  constexpr uint64_t kKeys = 20;
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq4,
                                KvFormat::tq8, KvFormat::mlx_native4}) {
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

// Lengths from device memory, and the three places of a layer's keys.
TEST(CudaHostAttention, CacheThatGrows) {
  expect_attended(host_device(),
                  {.kv_heads = 2,
                   .head_dim = 32,
                   .capacity = 100,
                   .layers = {{.tail = 16, .sink_tokens = 3},
                              {.window = 12},
                              {.k = KvFormat::tq4, .v = KvFormat::tq4, .window = 20, .tail = 16}},
                   .step_tokens = 30},
                  4, {2, 30, 1, 3, 30, 3});
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
