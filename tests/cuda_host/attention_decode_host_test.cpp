// Few rows and head dims of 64, 128, 256 and 512: attention_decode, on the host against double
// precision.
#include "attention_host_device.h"

namespace gyre::test {
namespace {

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
                  .sink_logits = true,
                  .splits = 2});
  }
  expect_decoded({.k_dim = 128, .length = 300, .k = KvFormat::f16, .v = KvFormat::tq3});
  expect_decoded({.k_dim = 256, .length = 300, .k = KvFormat::tq6, .v = KvFormat::bf16});
  expect_decoded({.k_dim = 64, .length = 300, .k = KvFormat::tq8, .v = KvFormat::tq4});
}

constexpr AttentionCase kMasked = {.tokens = 2,
                                   .heads = 4,
                                   .length = 200,
                                   .capacity = 216,
                                   .ring_start = 77,
                                   .k = KvFormat::tq4,
                                   .v = KvFormat::tq4,
                                   .window = 97,
                                   .soft_cap = 20,
                                   .sink_logits = true,
                                   .alibi_slopes = true};

TEST(CudaHostAttention, DecodingEveryRatioAndSeveralTokens) {
  for (const uint64_t heads : {1, 2, 3, 4, 5, 7, 8, 12, 16}) {
    expect_decoded({.heads = heads, .length = 70, .k = KvFormat::tq4, .v = KvFormat::tq4});
    expect_decoded({.heads = heads, .length = 70});
  }
  for (const uint64_t tokens : {2, 3, 4})
    expect_decoded(
        {.tokens = tokens, .heads = 2, .length = 90, .k = KvFormat::tq8, .v = KvFormat::tq8});
  const uint32_t before = decode_calls;
  expect_holds(kMasked);
  AttentionCase sharp = {.heads = 8, .length = 300, .k = KvFormat::tq8, .v = KvFormat::tq4};
  sharp.q_gain = 8;
  expect_holds(sharp);
  EXPECT_EQ(decode_calls, before + 2);
}

// Head dims of several scale blocks, whose rows are no whole groups of 16 bytes.
TEST(CudaHostAttention, DecodingOtherDims) {
  constexpr std::pair<KvFormat, std::array<uint64_t, 4>> kDims[] = {
      {KvFormat::f16, {80, 96, 192}},      {KvFormat::bf16, {112}},
      {KvFormat::tq2, {80, 112}},          {KvFormat::tq3, {64, 80, 96, 160}},
      {KvFormat::tq4, {80, 96, 112, 192}}, {KvFormat::tq5, {64, 80, 192}},
      {KvFormat::tq6, {80, 96, 112}},      {KvFormat::tq8, {80, 96, 112}}};
  for (const auto& [format, dims] : kDims) {
    for (const uint64_t dim : dims) {
      if (dim == 0) continue;
      AttentionCase c = {
          .heads = 6, .kv_heads = 2, .k_dim = dim, .length = 531, .k = format, .v = format};
      expect_decoded(c);
      c.length = 77, c.capacity = 83, c.ring_start = 50, c.splits = 2;
      expect_decoded(c);
    }
  }
  expect_decoded({.k_dim = 80, .length = 300, .k = KvFormat::f16, .v = KvFormat::tq4});
  expect_decoded({.k_dim = 80, .length = 300, .k = KvFormat::tq3, .v = KvFormat::f16});
  expect_decoded({.k_dim = 96, .length = 300, .k = KvFormat::tq6, .v = KvFormat::bf16});
  expect_decoded({.k_dim = 96, .length = 300, .k = KvFormat::tq8, .v = KvFormat::tq4});
}

TEST(CudaHostAttention, DecodingKeysAndValuesOfDifferentDims) {
  for (const uint64_t length : {77, 531}) {
    expect_decoded({.k_dim = 192, .v_dim = 128, .length = length});
    expect_decoded(
        {.k_dim = 192, .v_dim = 128, .length = length, .k = KvFormat::tq4, .v = KvFormat::tq4});
    expect_decoded(
        {.k_dim = 64, .v_dim = 96, .length = length, .k = KvFormat::tq8, .v = KvFormat::tq3});
    expect_decoded(
        {.k_dim = 80, .v_dim = 64, .length = length, .k = KvFormat::tq3, .v = KvFormat::f16});
  }
}

// Four warps share the keys: a block of them, and more than one, with keys for all or for a few.
TEST(CudaHostAttention, DecodingLongRows) {
  for (const uint64_t length : {1, 20, 33, 130, 700}) {
    for (const KvFormat format : {KvFormat::f16, KvFormat::tq4})
      expect_decoded({.heads = 3, .k_dim = 512, .length = length, .k = format, .v = format});
  }
  for (const uint64_t heads : {8, 16}) {
    expect_decoded({.heads = heads, .k_dim = 512, .length = 200});
    expect_decoded(
        {.heads = heads, .k_dim = 512, .length = 200, .k = KvFormat::tq4, .v = KvFormat::tq4});
    expect_decoded(
        {.heads = heads, .k_dim = 512, .length = 300, .k = KvFormat::tq8, .v = KvFormat::f16});
  }
  expect_decoded({.heads = 4, .k_dim = 512, .length = 300, .k = KvFormat::f16, .v = KvFormat::tq4});
  AttentionCase masked = kMasked;
  masked.heads = 2, masked.k_dim = 512;
  expect_decoded(masked);
  masked.q_gain = 8;
  expect_decoded(masked);
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4})
    expect_decoded({.heads = 4, .k_dim = 512, .length = 2100, .k = format, .v = format}, 8);
  const uint32_t before = cluster_calls;
  expect_decoded({.heads = 4, .k_dim = 512, .length = 1200, .k = KvFormat::tq4, .v = KvFormat::tq4},
                 8);
  EXPECT_EQ(cluster_calls, before + 1);
}

// Masks, and so many keys that all twelve warps have some.
TEST(CudaHostAttention, DecodingMasksWithTwelveWarps) {
  AttentionCase masked = kMasked;
  masked.heads = 2, masked.length = 1000, masked.capacity = 1016, masked.window = 897;
  for (const KvFormat format : {KvFormat::tq4, KvFormat::tq3}) {
    masked.k = masked.v = format;
    expect_decoded(masked);
  }
}

// Infinite scales and coordinates.
TEST(CudaHostAttention, DecodingKeysOfInfiniteLength) {
  const uint32_t before = decode_calls;
  for (const uint64_t dim : {64, 512}) expect_infinite_key(KvFormat::tq4, -3e38f, dim);
  for (const float coordinate : {kMinusInfinity, -kMinusInfinity}) {
    for (const uint64_t dim : {64, 128, 512}) {
      for (const KvFormat format : {KvFormat::f16, KvFormat::bf16})
        expect_infinite_key(format, coordinate, dim);
    }
    expect_infinite_key(KvFormat::f16, coordinate, 128, 16);
  }
  EXPECT_EQ(decode_calls, before + 16);
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

}  // namespace
}  // namespace gyre::test
