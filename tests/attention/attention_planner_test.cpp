// The plans of the CUDA planner, through the ops, without a GPU. What is pinned here was measured:
// change it with figures.
#include <gtest/gtest.h>

#include <bit>
#include <sstream>
#include <string>

#include "attention/plan_device.h"

namespace gyre::test {
namespace {

constexpr cuda::CudaLimits kH200{132, 227 << 10, 228 << 10, 90},
    kA100{108, 163 << 10, 164 << 10, 80}, kSmall{84, 99 << 10, 100 << 10, 86},
    kNewSmall{170, 99 << 10, 100 << 10, 120};

constexpr const char* kAnyShape = "any shape, 32 splits, separate";
constexpr const char* kManyRows = "many rows, 16 splits, separate";

struct Pinned {
  uint64_t heads, kv_heads, head_dim, keys;
  const char* formats;  // some, between spaces
  const char* plan;
};

void expect_pinned(const cuda::CudaLimits& limits, std::initializer_list<Pinned> rows) {
  CudaPlans plans(limits);
  for (const Pinned& row : rows) {
    std::istringstream formats(row.formats);
    for (std::string format; formats >> format;) {
      EXPECT_EQ(plans.of({row.heads, row.kv_heads, row.head_dim, row.keys, format.c_str()}),
                row.plan)
          << row.heads << "/" << row.kv_heads << "/" << row.head_dim << " " << row.keys << " keys, "
          << format;
    }
  }
}

constexpr const char* kInCluster4 = "decode 4 rows, clusters of 8, 8 splits, in cluster";
constexpr const char* kInCluster8 = "decode 8 rows, clusters of 8, 8 splits, in cluster";
constexpr const char* kRows4 = "decode 4 rows, 16 splits, in kernel";
constexpr const char* kRows8 = "decode 8 rows, 16 splits, in kernel";
constexpr const char* kPairs4 = "decode 4 rows, clusters of 2, 16 splits, in kernel";
constexpr const char* kPairs8 = "decode 8 rows, clusters of 2, 16 splits, in kernel";
constexpr const char* kPairs12 = "decode 12 rows, clusters of 2, 16 splits, in kernel";
constexpr const char* kPairs16 = "decode 16 rows, clusters of 2, 16 splits, in kernel";

// Every row of `gyre bench attention --device cuda:0`: what the figures in docs/benchmarks.md were
// measured with.
TEST(CudaPlanner, BenchmarkShapesOnAnH200) {
  constexpr const char* kLevels = "tq8 tq8+tq4 tq6 tq5 tq4 tq3 tq2";
  expect_pinned(kH200, {
                           {32, 8, 128, 4096, "f16 bf16", kInCluster8},
                           {32, 8, 128, 4096, kLevels, kInCluster4},
                           {32, 8, 128, 32768, "f16 bf16", kRows8},
                           {32, 8, 128, 32768, kLevels, kRows4},
                           {32, 8, 128, 131072, "f16 bf16", kRows8},
                           {32, 8, 128, 131072, kLevels, kRows4},
                           {16, 8, 256, 4096, "f16", kInCluster8},
                           {16, 8, 256, 4096, "tq8", kInCluster4},
                           {16, 8, 256, 4096, "tq4", kRows4},
                           {16, 8, 256, 32768, "f16", kPairs8},
                           {16, 8, 256, 32768, "tq8 tq4", kRows4},
                           {16, 8, 256, 131072, "f16", kPairs8},
                           {16, 8, 256, 131072, "tq8 tq4", kRows4},
                           {1024, 256, 128, 4096, "f16", "decode 8 rows, 1 splits"},
                           {1024, 256, 128, 4096, "tq8 tq4", "decode 4 rows, 1 splits"},
                           {8, 8, 128, 32768, "f16", kRows8},
                           {8, 8, 128, 32768, "tq8 tq4", kRows4},
                           {16, 8, 128, 32768, "f16", kRows8},
                           {16, 8, 128, 32768, "tq8 tq4", kRows4},
                           {48, 8, 128, 32768, "f16 tq8 tq4", kRows8},
                           {56, 8, 128, 32768, "f16 tq8 tq4", kRows8},
                           {64, 8, 128, 32768, "f16 tq8 tq4", kRows8},
                           {96, 8, 128, 32768, "f16", kPairs16},
                           {96, 8, 128, 32768, "tq8 tq4", kPairs12},
                           {128, 8, 128, 32768, "f16 tq8 tq4", kPairs16},
                           {32, 8, 64, 65536, "f16", kRows8},
                           {32, 8, 64, 65536, "tq8 tq4", kRows4},
                           {32, 8, 512, 8192, "f16", kPairs8},
                           {32, 8, 512, 8192, "tq8 tq4", kPairs4},
                           {32, 8, 128, 32749, "f16", kRows8},
                           {32, 8, 128, 32749, "tq8 tq4", kRows4},
                       });
}

// Each row is one step beside the next.
TEST(CudaPlanner, Thresholds) {
  expect_pinned(
      kH200, {
                 // Bytes of a KV head that a cluster takes, where formats are whole bytes.
                 {32, 8, 128, 8192, "f16", kInCluster8},
                 {32, 8, 128, 8193, "f16", kRows8},
                 {32, 8, 128, 16131, "tq8", kInCluster4},
                 {32, 8, 128, 16132, "tq8", kRows4},
                 // Codes that it takes, where they are unpacked, for four rows and for eight.
                 {32, 8, 128, 6144, "tq4", kInCluster4},
                 {32, 8, 128, 6145, "tq4", kRows4},
                 {64, 8, 128, 3072, "tq8+tq4", kInCluster8},
                 {64, 8, 128, 3073, "tq8+tq4", kRows8},
                 // Keys that are worth more than one block.
                 {32, 8, 128, 128, "tq4", "decode 4 rows, 1 splits"},
                 {32, 8, 128, 129, "tq4", kInCluster4},
                 // Clusters leave at most three quarters of the multiprocessors idle.
                 {64, 16, 128, 2048, "tq4", kInCluster4},
                 {68, 17, 128, 2048, "tq4", "decode 4 rows, 7 splits, in kernel"},
                 {20, 5, 128, 2048, "tq4", kInCluster4},
                 {16, 4, 128, 2048, "tq4", "decode 4 rows, 16 splits, in kernel"},
                 {16, 4, 128, 8192, "tq4", "decode 4 rows, 33 splits, in kernel"},
                 // Sums that make pairs pay, and an even number of splits.
                 {96, 8, 128, 8192, "tq4", kPairs12},
                 {64, 8, 128, 8192, "tq4", kRows8},
                 {108, 9, 128, 8192, "tq4", "decode 12 rows, clusters of 2, 14 splits, in kernel"},
                 {120, 10, 128, 8192, "tq4", "decode 12 rows, 13 splits, in kernel"},
                 // Two splits where one per multiprocessor leaves many idle in the last wave.
                 {200, 50, 128, 8192, "tq4", "decode 4 rows, 2 splits, in kernel"},
                 {264, 66, 128, 8192, "tq4", "decode 4 rows, 2 splits, in kernel"},
                 {268, 67, 128, 8192, "tq4", "decode 4 rows, 7 splits, in kernel"},
                 {320, 80, 128, 8192, "tq4", "decode 4 rows, 3 splits, in kernel"},
                 {528, 132, 128, 8192, "tq4", "decode 4 rows, 1 splits"},
                 {472, 118, 128, 8192, "tq4", "decode 4 rows, 1 splits"},
                 {532, 133, 128, 8192, "tq4", "decode 4 rows, 6 splits, in kernel"},
                 {532, 133, 128, 512, "tq4", "decode 4 rows, 3 splits, in kernel"},
             });
}

TEST(CudaPlanner, WhatAttentionDecodeTakes) {
  CudaPlans plans(kH200);
  const auto expect = [&](const PlanCase& p, const char* plan) {
    EXPECT_EQ(plans.of(p), plan) << p.heads << "/" << p.kv_heads << "/" << p.head_dim << " "
                                 << p.keys << " keys, " << p.formats;
  };
  expect({.heads = 128}, "decode 16 rows, clusters of 8, 8 splits, in cluster");
  expect({.heads = 136}, kManyRows);  // 17 rows
  expect({.formats = "tq4", .tokens = 4}, kPairs16);
  expect({.formats = "tq4", .tokens = 5}, kManyRows);  // 20 rows
  expect({.formats = "f16+tq4", .tokens = 4}, kPairs16);
  expect({.tokens = 2},
         kManyRows);  // 16-bit values, which may be NaN, and rows that see different keys
  expect({.formats = "tq4", .tokens = 2, .tree_mask = true}, kManyRows);
  expect({.head_dim = 72}, kAnyShape);
  expect({.head_dim = 96}, kInCluster8);
  expect({.head_dim = 80, .formats = "tq3"}, kInCluster4);
  expect({.v_head_dim = 64}, kInCluster8);
  expect({.head_dim = 192, .v_head_dim = 128}, kInCluster8);
  expect({.v_head_dim = 72}, kAnyShape);
  expect({.head_dim = 512, .v_head_dim = 256}, kAnyShape);
  for (const char* formats : {"f32", "f16+f32", "mlx_native4"})
    expect({.formats = formats}, kAnyShape);
  for (const char* formats : {"tq3", "tq5", "tq4+tq3", "tq6"})
    expect({.head_dim = 64, .formats = formats}, kInCluster4);
  // A window leaves fewer keys.
  expect({.keys = 16384, .window = 300}, kInCluster8);
  expect({.keys = 16384, .formats = "tq4", .window = 100}, "decode 4 rows, 1 splits");
}

// Up to 64 rows blocks of 64 fill the GPU with splits; the keys of a prompt are not cut.
TEST(CudaPlanner, WhatAttentionManyRowsTakes) {
  CudaPlans h200(kH200);
  const auto expect = [&](const PlanCase& p, const char* plan) {
    EXPECT_EQ(h200.of(p), plan) << p.tokens << " tokens, " << p.keys << " keys, " << p.formats;
  };
  expect({.keys = 32768, .formats = "tq4", .tokens = 8}, "many rows, 33 splits, separate");
  expect({.keys = 32768, .tokens = 16}, "many rows, 33 splits, separate");
  expect({.keys = 32768, .tokens = 17}, "many rows, 1 splits");
  expect({.heads = 24, .kv_heads = 4, .head_dim = 256, .keys = 32768, .tokens = 4},
         "many rows, 33 splits, separate");
  expect({.formats = "tq8+tq4", .tokens = 512}, "many rows, 1 splits");
  expect({.head_dim = 192, .tokens = 512, .v_head_dim = 128}, "many rows, 1 splits");
  expect({.formats = "tq4", .tokens = 20, .splits = 5}, "many rows, 5 splits");
  CudaPlans a100(kA100), small(kSmall);
  EXPECT_EQ(a100.of({.formats = "tq4", .tokens = 512}), "many rows, 1 splits");
  EXPECT_EQ(small.of({.formats = "tq4", .tokens = 512}), "many rows, 1 splits");
  // What no operand holds: f32, bf16 keys by f16 queries, several scales to a row.
  for (const char* formats : {"f32", "f16+f32", "bf16", "mlx_native4"})
    expect({.formats = formats, .tokens = 5}, kAnyShape);
  expect({.head_dim = 96, .formats = "tq4", .tokens = 5}, kAnyShape);
  expect({.head_dim = 64, .formats = "tq3", .tokens = 5}, kAnyShape);
}

// The caller says how many splits, and gets their states: no clusters, no pairs.
TEST(CudaPlanner, PartialStates) {
  CudaPlans plans(kH200);
  EXPECT_EQ(plans.of({.formats = "tq4", .splits = 8}), "decode 4 rows, 8 splits");
  EXPECT_EQ(plans.of({.heads = 96, .keys = 8192, .formats = "tq4", .splits = 16}),
            "decode 12 rows, 16 splits");
  EXPECT_EQ(plans.of({.formats = "f32", .splits = 5}), "any shape, 5 splits");
  for (const abi::AttentionParams& p : plans.impl().params())
    EXPECT_EQ(p.partial, abi::kAttentionPartial);
}

TEST(CudaPlanner, KernelForAnyShape) {
  CudaPlans plans(kH200);
  const auto expect = [&](const PlanCase& p, const char* plan) {
    EXPECT_EQ(plans.of(p), plan) << p.tokens << " tokens, " << p.keys << " keys";
  };
  expect({.keys = 131072, .formats = "f32"}, "any shape, 66 splits, separate");
  expect({.keys = 131072, .formats = "f32", .tokens = 16}, "any shape, 66 splits, separate");
  expect({.keys = 131072, .formats = "f32", .tokens = 17}, "any shape, 33 splits, separate");
  expect({.formats = "f32", .tokens = 512}, "any shape, 2 splits, separate");
  expect({.formats = "f32", .tokens = 4096}, "any shape, 1 splits");
  expect({.heads = 8, .keys = 1024, .formats = "f32"}, "any shape, 8 splits, separate");
  expect({.heads = 8, .keys = 1025, .formats = "f32"}, "any shape, 9 splits, separate");
}

// Dense caches with strides of the caller's: 16 bytes must be copied from where each key begins.
TEST(CudaPlanner, Alignment) {
  CudaPlans plans(kH200);
  const PlanCase p;
  const auto planned = [&](uint64_t padding, uint64_t offset) {
    const auto token_major = [&](KvRole role) {
      KvBuffer cache;
      cache.shape = {KvFormat::f16, role, p.kv_heads, p.keys, p.head_dim};
      cache.codes = plans.device()
                        .tensor(DType::f16, {p.keys, p.kv_heads, p.head_dim + padding})
                        .slice(2, offset, p.head_dim)
                        .permute({1, 0, 2});
      return cache;
    };
    return plans.of(p, token_major(KvRole::k), token_major(KvRole::v));
  };
  EXPECT_EQ(planned(0, 0), kInCluster8);
  EXPECT_EQ(planned(8, 0), kInCluster8);
  EXPECT_EQ(planned(8, 8), kInCluster8);
  EXPECT_EQ(planned(4, 0), kAnyShape);
  EXPECT_EQ(planned(8, 4), kAnyShape);
  // Offsets of a tile have 32 bits.
  abi::AttentionProblem far = plans.problem();
  plans.of(p);
  far = plans.problem();
  far.v.codes_tile_stride = (uint64_t{1} << 26) - 128;
  EXPECT_EQ(text_of(cuda::plan_attention(far, kH200)), kInCluster8);
  far.v.codes_tile_stride = uint64_t{1} << 26;
  EXPECT_EQ(text_of(cuda::plan_attention(far, kH200)), kAnyShape);
}

// Clusters from 9.0 on; fewer rows to a block where shared memory is small, or another kernel.
TEST(CudaPlanner, OtherGpus) {
  expect_pinned(kA100, {{32, 8, 128, 4096, "tq4", "decode 4 rows, 13 splits, in kernel"},
                        {32, 8, 128, 32768, "f16", "decode 8 rows, 13 splits, in kernel"},
                        {128, 8, 128, 32768, "tq4", "decode 16 rows, 13 splits, in kernel"}});
  expect_pinned(kSmall, {{32, 8, 128, 4096, "tq4", "decode 4 rows, 10 splits, in kernel"},
                         {64, 8, 256, 32768, "tq8", "decode 8 rows, 10 splits, in kernel"},
                         {32, 8, 512, 32768, "tq8", "decode 4 rows, 10 splits, in kernel"},
                         {64, 8, 512, 32768, "tq8", "decode 4 rows, 5 splits, in kernel"},
                         {64, 8, 512, 32768, "f16", "any shape, 42 splits, separate"}});
  expect_pinned(kNewSmall, {{32, 8, 128, 4096, "tq4", kInCluster4},
                            {64, 8, 512, 32768, "tq4", "decode 8 rows, 21 splits, in kernel"}});
}

// Every spec is a question with an answer, also those that name no variant.
TEST(CudaPlanner, DecodeVariants) {
  const auto has = [](uint32_t k, uint32_t v, uint32_t head_dim, uint32_t rows, uint32_t cluster) {
    const uint64_t spec = spec_key(abi::attention_decode_spec(k, v, head_dim, rows, cluster));
    EXPECT_EQ(cuda::fits_attention_decode(spec, kH200), !cuda::name_attention_decode(spec).empty());
    return cuda::fits_attention_decode(spec, kH200);
  };
  constexpr uint32_t kF32 = 0, kF16 = 1;
  EXPECT_TRUE(has(kF16, kF16, 128, 8, 1));
  EXPECT_TRUE(has(kF16, abi::kTq4, 512, 4, 8));
  EXPECT_TRUE(has(abi::kTq4, abi::kTq4, 256, 8, 2));
  EXPECT_FALSE(has(abi::kTq4, abi::kTq4, 256, 12, 2));  // sums do not fit into registers
  EXPECT_FALSE(has(kF16, kF16, 128, 4, 1));
  EXPECT_FALSE(has(kF16, kF32, 128, 8, 1));
  EXPECT_FALSE(has(abi::kTq4, abi::kMlxNative4, 128, 8, 1));
  for (const uint32_t rows : {0, 5, 20, 255}) EXPECT_FALSE(has(kF16, abi::kTq4, 128, rows, 1));
  for (const uint32_t cluster : {0, 3, 4, 16}) EXPECT_FALSE(has(kF16, kF16, 128, 8, cluster));
  for (const uint32_t dim : {32, 48, 80, 96, 112, 160, 192, 240}) {
    EXPECT_TRUE(has(kF16, kF16, dim, 8, 1)) << dim;
    for (const uint32_t format : {abi::kTq2, abi::kTq3, abi::kTq4, abi::kTq5, abi::kTq6, abi::kTq8})
      EXPECT_TRUE(has(format, format, dim, 4, 1)) << format << " " << dim;
  }
  EXPECT_FALSE(has(abi::kTq4, abi::kTq4, 192, 12, 1));
  for (const uint32_t dim : {0, 1, 16, 72, 104, 272, 576, 1024, 65535})
    EXPECT_FALSE(has(kF16, kF16, dim, 8, 1)) << dim;
}

// Over pages: a batch of up to 64 sequences, those of the decode phase.
abi::AttentionProblem paged_problem(KvFormat format, uint64_t heads, uint32_t head_dim,
                                    uint32_t max_query_length) {
  abi::AttentionProblem p{};
  p.tokens = 64, p.heads = heads, p.kv_heads = 8;
  p.capacity = p.keys = 131072;
  p.addresses = 256;
  const uint32_t bits = describe(format).bits;
  const uint64_t head_bytes = uint64_t{64} * head_dim * bits / 4;
  p.k = {.codes_head_stride = head_bytes,
         .codes_tile_stride = uint64_t{head_dim} * bits,
         .scales_head_stride = describe(format).compressed ? head_bytes : 0,
         .scales_tile_stride = describe(format).compressed ? 16u : 0u,
         .format = static_cast<uint32_t>(format),
         .role = 0,
         .head_dim = head_dim,
         .scale_factor = 1};
  p.v = p.k;
  p.v.role = 1;
  p.sequences = 64, p.page_stride = 8 * head_bytes, p.page_tokens = 64;
  p.max_query_length = max_query_length;
  p.phase = abi::AttentionPhase::decode;
  return p;
}

TEST(CudaPlanner, Pages) {
  const auto plan_of = [](const abi::AttentionProblem& p) {
    return cuda::plan_attention(p, kH200);
  };
  const auto expect_rows = [&](const abi::AttentionProblem& p, uint32_t rows, bool by_token) {
    const abi::AttentionPlan plan = plan_of(p);
    ASSERT_EQ(plan.kernel, abi::AttentionKernel::attention_decode);
    const auto spec = spec_from_key<abi::AttentionDecodeSpec>(plan.spec);
    EXPECT_EQ(spec.rows, rows);
    EXPECT_EQ(spec.paged, 2);
    EXPECT_EQ(spec.cluster, 1);
    EXPECT_EQ(plan.reduce, abi::AttentionReduce::in_kernel);
    EXPECT_EQ(plan.schedule.blocks, kH200.multiprocessors);
    EXPECT_EQ(plan.schedule.rows, rows);
    EXPECT_EQ(plan.schedule.by_token, by_token ? 1u : 0u);
    // Whole groups of pieces, of a power of two of keys.
    EXPECT_EQ(plan.schedule.group.fewest_keys % abi::kGroupPieces, 0u);
    EXPECT_EQ(std::popcount(plan.schedule.group.fewest_keys), 1);
    EXPECT_EQ(std::popcount(plan.schedule.group.most_pieces), 1);
    // The states of a unit's groups for every block; no more for more sequences.
    const uint64_t state = uint64_t{rows} * p.k.head_dim;
    EXPECT_GE(plan.scratch_floats, plan.schedule.blocks * plan.schedule.group.most_pieces * state);
    abi::AttentionProblem longer = p;
    longer.sequences *= 64;
    EXPECT_EQ(plan_of(longer).scratch_floats, plan.scratch_floats);
    EXPECT_EQ(cuda::name_attention_decode(plan.spec).find("gyre::cuda::attention_decode_paged<"),
              0u);
  };
  expect_rows(paged_problem(KvFormat::tq4, 32, 128, 1), 4, false);
  expect_rows(paged_problem(KvFormat::tq4, 32, 128, 2), 8, false);
  expect_rows(paged_problem(KvFormat::tq4, 32, 128, 512), 8, false);
  expect_rows(paged_problem(KvFormat::tq4, 16, 256, 512), 8, false);
  expect_rows(paged_problem(KvFormat::f16, 32, 128, 512), 8, true);  // a unit has one token
  expect_rows(paged_problem(KvFormat::tq3, 32, 80, 1), 4, false);
  // Pages that a stage does not fit into.
  abi::AttentionProblem small = paged_problem(KvFormat::tq4, 32, 128, 1);
  small.page_tokens = 16;
  EXPECT_EQ(spec_from_key<abi::AttentionDecodeSpec>(plan_of(small).spec).paged, 1);

  const auto expect_any = [&](const abi::AttentionProblem& p) {
    const abi::AttentionPlan plan = plan_of(p);
    EXPECT_EQ(plan.kernel, abi::AttentionKernel::attention);
    EXPECT_EQ(spec_from_key<abi::AttentionSpec>(plan.spec).paged, 1);
    EXPECT_EQ(plan.splits, 1u);
    EXPECT_EQ(plan.scratch_floats, 0u);
    EXPECT_EQ(plan.reduce, abi::AttentionReduce::none);
  };
  abi::AttentionProblem p = paged_problem(KvFormat::tq4, 32, 128, 1);
  p.phase = abi::AttentionPhase::prompt;
  const abi::AttentionPlan prompts = plan_of(p);
  EXPECT_EQ(prompts.kernel, abi::AttentionKernel::attention_many_rows);
  EXPECT_EQ(spec_from_key<abi::AttentionRowsSpec>(prompts.spec).gpu, 0);  // for 128 rows
  EXPECT_EQ(prompts.splits, 1u);
  EXPECT_EQ(prompts.scratch_floats, 0u);
  EXPECT_EQ(prompts.reduce, abi::AttentionReduce::none);
  p.phase = abi::AttentionPhase::all;
  expect_any(p);
  expect_any(paged_problem(KvFormat::tq4, 32, 72, 1));
  expect_any(paged_problem(KvFormat::f32, 32, 128, 1));
  expect_any(paged_problem(KvFormat::tq4, 256, 128, 1));  // 32 heads to a KV head
  p = paged_problem(KvFormat::tq4, 32, 128, 1);
  p.v.codes_head_stride *= 2;
  expect_any(p);
  p = paged_problem(KvFormat::tq4, 32, 128, 1);
  p.page_stride = uint64_t{1} << 33;
  expect_any(p);
  p = paged_problem(KvFormat::tq4, 32, 128, 1);
  p.keys = p.capacity = uint64_t{1} << 31;
  expect_any(p);
}

// A plan that finds no multiprocessors or no keys is a plan.
TEST(CudaPlanner, DegenerateLimits) {
  CudaPlans none({});
  EXPECT_EQ(none.of({}), "any shape, 1 splits");
  CudaPlans idle({0, 227 << 10, 228 << 10, 90});
  EXPECT_EQ(idle.of({}), "decode 8 rows, 1 splits");
  CudaPlans h200(kH200);
  EXPECT_EQ(h200.of({.keys = 0}), "many rows, 1 splits");
  EXPECT_EQ(h200.of({.keys = 1}), "decode 8 rows, 1 splits");
}

}  // namespace
}  // namespace gyre::test
