// attention_decode where the keys of a head are split among blocks: joined in global memory, in
// clusters and in pairs. On the host, against double precision.
#include "attention_host_device.h"

namespace gyre::test {
namespace {

// One graph twice: counters are as they were, and what the first left does not show.
void expect_replays(KvFormat format, uint64_t heads, uint64_t head_dim) {
  constexpr uint64_t kKeys = 3500;
  const Device d = host_device(8);
  const uint32_t before = decode_calls;
  const AttentionInputs in =
      one_head(d, format, gaussian_rows(heads, head_dim, 3), gaussian_rows(kKeys, head_dim, 1),
               gaussian_rows(kKeys, head_dim, 2), head_dim);
  Encoder encoder(d);
  attention(encoder, in, {.length = kKeys, .scale = 0.125f});
  const Graph graph = encoder.instantiate();
  graph.replay().wait();
  const std::vector<float> once = floats_of(in.out);
  in.out.write_from(std::span<const float>(std::vector<float>(heads * head_dim, 7.0f)));
  graph.replay().wait();
  EXPECT_EQ(floats_of(in.out), once);
  EXPECT_EQ(decode_calls, before + 2);
}

// The last block to have left a row finds what the others left.
TEST(CudaHostAttention, DecodingMergesSplits) {
  const uint32_t before = cluster_calls;
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
    expect_decoded({.heads = 4, .kv_heads = 2, .length = 3000, .k = format, .v = format}, 8);
    expect_decoded({.heads = 5, .length = 2049, .k = format, .v = format, .sink_logits = true}, 8);
  }
  expect_replays(KvFormat::tq8, 2, 64);
  EXPECT_EQ(cluster_calls, before);
}

// Rows of several parts have counters of their own.
TEST(CudaHostAttention, DecodingMergesLongRowsAgain) {
  for (const uint64_t head_dim : {256, 512}) expect_replays(KvFormat::tq4, 4, head_dim);
}

// A block of one warp writes all of its rows.
TEST(CudaHostAttention, DecodingInClustersOfSmallBlocks) {
  limits = {84, 99 << 10, 100 << 10, 120};
  const uint32_t before = cluster_calls;
  for (const uint64_t heads : {9, 16})
    expect_decoded({.heads = heads, .k_dim = 256, .length = 1500}, 8);
  EXPECT_EQ(cluster_calls, before + 2);
  limits = kLarge;
}

// The blocks of a cluster find what the others have; some of them have no keys.
TEST(CudaHostAttention, DecodingInClusters) {
  const uint32_t before = cluster_calls;
  for (const uint64_t length : {1030, 1300, 1777, 2500}) {
    for (const uint64_t heads : {3, 11})
      expect_decoded(
          {.heads = heads, .k_dim = 64, .length = length, .k = KvFormat::tq4, .v = KvFormat::tq4},
          8);
    expect_decoded({.heads = 4, .k_dim = 64, .length = length, .sink_logits = true}, 8);
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
  EXPECT_EQ(cluster_calls, before + 13);
}

// Blocks that share the rows of a KV head do not count for each other.
TEST(CudaHostAttention, DecodingMergesGroupsOfRows) {
  const uint32_t before = pair_calls;
  for (const uint64_t length : {200, 300})  // in two splits, a pair, and in three
    expect_decoded(
        {.heads = 16, .k_dim = 512, .length = length, .k = KvFormat::tq4, .v = KvFormat::tq4}, 8);
  EXPECT_EQ(pair_calls, before + 1);
}

// More splits, and pairs of them, than are joined at a time: by two, and by one.
TEST(CudaHostAttention, DecodingMergesManySplits) {
  for (const uint32_t splits : {34u, 17u})
    expect_decoded(
        {.heads = 2, .k_dim = 64, .length = splits * 128, .k = KvFormat::tq8, .v = KvFormat::tq8},
        splits);
  const uint32_t before = pair_calls;
  for (const uint32_t splits : {20u, 18u})
    expect_decoded(
        {.heads = 12, .k_dim = 128, .length = splits * 128, .k = KvFormat::tq4, .v = KvFormat::tq4},
        splits);
  EXPECT_EQ(pair_calls, before + 2);
}

// Blocks in pairs, one of which may have no keys; the last pair to end finds what the others left,
// and leaves the counters as they were.
TEST(CudaHostAttention, DecodingInPairs) {
  const uint32_t before = pair_calls;
  constexpr std::pair<KvFormat, uint64_t> kPairs[] = {
      {KvFormat::f16, 16}, {KvFormat::tq4, 12}, {KvFormat::tq4, 16}};
  for (const auto& [format, heads] : kPairs) {
    for (const uint64_t length : {1700, 3300})
      expect_decoded({.heads = heads, .k_dim = 128, .length = length, .k = format, .v = format}, 8);
  }
  expect_decoded({.heads = 4,
                  .k_dim = 512,
                  .length = 1900,
                  .capacity = 1911,
                  .ring_start = 270,
                  .k = KvFormat::tq4,
                  .v = KvFormat::tq4,
                  .window = 1833,
                  .sink_logits = true},
                 8);
  expect_replays(KvFormat::tq4, 16, 128);
  EXPECT_EQ(pair_calls, before + 9);
}

// What was recorded for many keys runs with few: only some of the pairs have any, or one alone.
TEST(CudaHostAttention, CacheThatGrowsInPairs) {
  const uint32_t before = pair_calls;
  expect_attended(host_device(8),
                  {.kv_heads = 1,
                   .head_dim = 128,
                   .capacity = 3800,
                   .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq4},
                              {.k = KvFormat::f16, .v = KvFormat::f16}}},
                  16, {1, 500, 1, 512, 1, 512, 512, 1, 512, 1});
  EXPECT_EQ(pair_calls, before + 10);
}

// Layers of different formats have one scratch, which those that take clusters leave alone.
TEST(CudaHostAttention, CacheThatGrowsInClusters) {
  const uint32_t before = cluster_calls;
  expect_attended(host_device(8),
                  {.kv_heads = 1,
                   .head_dim = 64,
                   .capacity = 1200,
                   .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq4},
                              {.k = KvFormat::tq8, .v = KvFormat::tq8},
                              {.k = KvFormat::tq4, .v = KvFormat::tq4}}},
                  3, {1, 40, 1, 100, 1});
  EXPECT_EQ(cluster_calls, before + 6);
}

// Few rows, several tokens: each has a boundary of its own between body and tail.
TEST(CudaHostAttention, TailsOfSeveralTokens) {
  expect_attended(
      host_device(8),
      {.kv_heads = 1,
       .head_dim = 128,
       .capacity = 600,
       .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq4, .tail = 70, .sink_tokens = 3},
                  {.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 70}},
       .step_tokens = 200},
      4, {200, 1, 3, 4, 150, 2, 4});
}

}  // namespace
}  // namespace gyre::test
