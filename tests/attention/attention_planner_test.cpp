// The plans of the CUDA planner, through the ops, without a GPU: which kernel takes what, and what
// holds of every plan. Numbers that were tuned are not pinned.
#include <bit>

#include "attention/plan_device.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr cuda::CudaLimits kH200{132, 227 << 10, 228 << 10, 90},
    kA100{108, 163 << 10, 164 << 10, 80}, kSmall{84, 99 << 10, 100 << 10, 86},
    kNewSmall{170, 99 << 10, 100 << 10, 120};

constexpr const char *kAnyShape = "any shape", *kManyRows = "many rows", *kRows4 = "decode 4 rows",
                     *kRows8 = "decode 8 rows", *kRows16 = "decode 16 rows";

// Kernel and rows of a block: numbers of splits and clusters are tuned.
std::string kernel_of(CudaPlans& plans, const PlanCase& p) {
  const std::string text = plans.of(p);
  return text.substr(0, text.find(','));
}

// What holds of every plan, whatever was measured to be fastest.
void expect_sound(const CudaPlans& plans, const cuda::CudaLimits& gpu) {
  const abi::AttentionProblem& problem = plans.problem();
  const abi::AttentionPlan& plan = plans.plan();
  ASSERT_GE(plan.splits, 1u);
  ASSERT_LE(plan.splits, std::max<uint64_t>(problem.keys, 1)) << "a split without a key";
  ASSERT_EQ(plan.splits == 1, plan.reduce == abi::AttentionReduce::none);
  ASSERT_TRUE(plan.kernel != abi::AttentionKernel::attention_many_rows ||
              cuda::fits_attention_many_rows(plan.spec, gpu));
  if (plan.kernel == abi::AttentionKernel::attention_decode) {
    const auto spec = spec_from_key<abi::AttentionDecodeSpec>(plan.spec);
    const uint64_t rows = problem.tokens * problem.heads;
    ASSERT_TRUE(cuda::fits_attention_decode(plan.spec, gpu));
    ASSERT_TRUE(spec.cluster == 1 || gpu.arch >= 90);
    ASSERT_EQ(plan.splits % spec.cluster, 0u) << "a cluster that is not whole";
    const bool in_cluster =
        plan.reduce == abi::AttentionReduce::in_kernel && plan.scratch_floats == 0;
    ASSERT_TRUE(!in_cluster || plan.splits == spec.cluster);
    ASSERT_TRUE(plan.reduce != abi::AttentionReduce::in_kernel || in_cluster ||
                plan.scratch_floats >= rows * plan.splits / spec.cluster * problem.v.head_dim);
  }
  // A long context of few heads does not leave most of the GPU idle.
  ASSERT_TRUE(problem.keys < uint64_t{128} * gpu.multiprocessors ||
              4 * plan.splits * problem.heads >= gpu.multiprocessors);
}

TEST(CudaPlanner, EveryPlanIsSound) {
  for (const cuda::CudaLimits& gpu : {kH200, kA100, kSmall, kNewSmall}) {
    CudaPlans plans(gpu);
    for (const uint64_t kv_heads : {1, 4, 5, 8, 17, 50, 133}) {
      for (const uint64_t group : {1, 4, 5, 8, 12, 16, 17}) {
        for (const uint64_t dim : {64, 96, 128, 256, 512}) {
          for (const char* formats : {"f16", "tq8", "tq4", "tq8+tq4", "f32"}) {
            for (const uint64_t keys : {1, 128, 129, 500, 4096, 131072}) {
              plans.of({kv_heads * group, kv_heads, dim, keys, formats});
              expect_sound(plans, gpu);
              if (testing::Test::HasFatalFailure()) {
                FAIL() << gpu.multiprocessors << " multiprocessors: " << kv_heads << " KV heads of "
                       << group << ", " << dim << ", " << keys << " keys, " << formats << ": "
                       << text_of(plans.plan());
              }
            }
          }
        }
      }
    }
  }
}

TEST(CudaPlanner, WhatAttentionDecodeTakes) {
  CudaPlans plans(kH200);
  const auto expect = [&](const PlanCase& p, const char* kernel) {
    EXPECT_EQ(kernel_of(plans, p), kernel) << p.heads << "/" << p.kv_heads << "/" << p.head_dim
                                           << " " << p.keys << " keys, " << p.formats;
  };
  expect({.heads = 128}, kRows16);
  expect({.heads = 136}, kManyRows);  // 17 rows
  expect({.formats = "tq4", .tokens = 4}, kRows16);
  // Over levels up to 64 rows, if six blocks hold them or no other kernel for many rows takes them.
  for (const uint64_t tokens : {5, 16}) expect({.formats = "tq4", .tokens = tokens}, kRows16);
  expect({.formats = "tq4", .tokens = 17}, kManyRows);
  expect({.head_dim = 256, .formats = "tq4", .tokens = 12}, kRows8);
  expect({.head_dim = 256, .formats = "tq4", .tokens = 13}, kManyRows);
  expect({.head_dim = 80, .formats = "tq3", .tokens = 16}, kRows16);
  expect({.head_dim = 80, .formats = "tq3", .tokens = 17}, kAnyShape);
  expect({.formats = "f16+tq4", .tokens = 5}, kManyRows);
  expect({.formats = "f16+tq4", .tokens = 4}, kRows16);
  expect({.tokens = 2}, kRows8);
  expect({.formats = "tq4+f16", .tokens = 4}, kRows16);
  expect({.tokens = 5}, kManyRows);
  expect({.formats = "tq4", .tokens = 2, .tree_mask = true}, kManyRows);
  expect({.head_dim = 72}, kAnyShape);
  expect({.head_dim = 96}, kRows8);
  expect({.head_dim = 80, .formats = "tq3"}, kRows4);
  expect({.v_head_dim = 64}, kRows8);
  expect({.head_dim = 192, .v_head_dim = 128}, kRows8);
  expect({.v_head_dim = 72}, kAnyShape);
  expect({.head_dim = 512, .v_head_dim = 256}, kAnyShape);
  for (const char* formats : {"f32", "f16+f32", "mlx_native4"})
    expect({.formats = formats}, kAnyShape);
  for (const char* formats : {"tq3", "tq5", "tq4+tq3", "tq6"})
    expect({.head_dim = 64, .formats = formats}, kRows4);
  // A window leaves fewer keys.
  EXPECT_EQ(plans.of({.keys = 16384, .formats = "tq4", .window = 100}), "decode 4 rows, 1 splits");
}

// The keys of a prompt are not cut; the splits of few rows are a second kernel's to reduce.
TEST(CudaPlanner, WhatAttentionManyRowsTakes) {
  CudaPlans h200(kH200);
  const auto expect = [&](const PlanCase& p, const char* kernel) {
    EXPECT_EQ(kernel_of(h200, p), kernel) << p.tokens << " tokens, " << p.formats;
  };
  for (const uint64_t tokens : {8, 16}) {
    expect({.keys = 32768, .formats = "tq4+f16", .tokens = tokens}, kManyRows);
    EXPECT_EQ(h200.plan().reduce, abi::AttentionReduce::separate);
  }
  for (const uint64_t tokens : {17, 512})
    EXPECT_EQ(h200.of({.keys = 32768, .tokens = tokens}), "many rows, 1 splits");
  EXPECT_EQ(h200.of({.formats = "tq4", .tokens = 20, .splits = 5}), "many rows, 5 splits");
  // A command ahead unpacks levels, if there are many and room for all of them.
  const auto expect_ahead = [&](const PlanCase& p, bool unpacks) {
    h200.of(p);
    const abi::AttentionPlan& plan = h200.plan();
    EXPECT_EQ(plan.kernel, abi::AttentionKernel::attention_many_rows);
    EXPECT_EQ(plan.ahead != 0, unpacks) << p.tokens << " tokens, " << p.keys << " keys";
    EXPECT_EQ(plan.reduce == abi::AttentionReduce::in_kernel, unpacks);
    EXPECT_TRUE(!unpacks ||
                plan.scratch_floats * 4 > h200.problem().keys * p.kv_heads * p.head_dim * 4);
  };
  for (const uint64_t keys : {256, 4096, 131072}) {
    for (const char* formats : {"tq4", "tq8", "tq4+tq8", "tq2"})
      expect_ahead({.keys = keys, .formats = formats, .tokens = 17}, true);
    expect_ahead({.keys = keys, .formats = "f16", .tokens = 17}, false);
    expect_ahead({.keys = keys, .formats = "tq4+f16", .tokens = 16}, false);  // split
  }
  expect_ahead({.keys = 255, .formats = "tq4", .tokens = 17}, false);
  expect_ahead({.keys = 262144, .formats = "tq4", .tokens = 17}, false);
  expect_ahead({.keys = 262144, .formats = "tq4", .tokens = 17, .window = 4096}, true);
  expect_ahead({.formats = "tq4+f16", .tokens = 17}, false);
  // Memory of one call alone: at most 32 MiB.
  expect_ahead({.keys = 7000, .formats = "tq4", .tokens = 17, .keeps_scratch = false}, true);
  expect_ahead({.keys = 8192, .formats = "tq4", .tokens = 17, .keeps_scratch = false}, false);
  CudaPlans a100(kA100), small(kSmall);
  EXPECT_EQ(a100.of({.formats = "tq4", .tokens = 512}), "many rows, 1 splits");
  EXPECT_EQ(small.of({.formats = "tq4", .tokens = 512}), "many rows, 1 splits");
  // What no operand holds: f32, bf16 keys by f16 queries, several scales to a row.
  for (const char* formats : {"f32", "f16+f32", "bf16", "mlx_native4"})
    expect({.formats = formats, .tokens = 5}, kAnyShape);
  expect({.head_dim = 96, .formats = "tq4", .tokens = 17}, kAnyShape);
  expect({.head_dim = 64, .formats = "tq3", .tokens = 17}, kAnyShape);
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
    const std::string text = plans.of(p, token_major(KvRole::k), token_major(KvRole::v));
    return text.substr(0, text.find(','));
  };
  for (const auto& [padding, offset] : {std::pair<uint64_t, uint64_t>{0, 0}, {8, 0}, {8, 8}})
    EXPECT_EQ(planned(padding, offset), kRows8);
  EXPECT_EQ(planned(4, 0), kAnyShape);
  EXPECT_EQ(planned(8, 4), kAnyShape);
  // Offsets of a tile have 32 bits.
  abi::AttentionProblem far = plans.problem();
  plans.of(p);
  far = plans.problem();
  far.v.codes_tile_stride = (uint64_t{1} << 26) - 128;
  EXPECT_EQ(cuda::plan_attention(far, kH200).kernel, abi::AttentionKernel::attention_decode);
  far.v.codes_tile_stride = uint64_t{1} << 26;
  EXPECT_EQ(cuda::plan_attention(far, kH200).kernel, abi::AttentionKernel::attention);
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

// Prompts of a batch over levels: those that have room are unpacked ahead, the others are another
// command's.
TEST(CudaPlanner, PromptsOverPages) {
  struct Prompts {
    uint64_t keys, sequences, tokens;
    bool keeps_scratch, unpacks, all;
    uint32_t max_query_length = 512;
  };
  constexpr Prompts kCases[] = {
      {4096, 1, 512, true, true, true},       {4096, 3, 8192, true, true, true},
      {4096, 64, 64, true, true, false},      {256, 64, 64, true, true, false},
      {255, 64, 64, true, false, false},      {131072, 64, 8192, true, true, false},
      {262144, 1, 512, true, true, false},    {4096, 1, 512, false, true, true},
      {4096, 64, 512, false, true, false},    {8192, 1, 512, false, true, false},
      {4096, 4, 64, true, false, false, 16},  {4096, 4, 68, true, true, false, 17},
      {4096, 5, 480, true, false, false, 96}, {4096, 5, 485, true, true, false, 97}};
  for (const KvFormat format : {KvFormat::tq4, KvFormat::tq8, KvFormat::f16}) {
    for (const Prompts& c : kCases) {
      SCOPED_TRACE(join(name(format), ", ", c.sequences, " of ", c.keys));
      abi::AttentionProblem p = paged_problem(format, 32, 128, c.max_query_length);
      p.phase = abi::AttentionPhase::many_rows;
      p.q_dtype = static_cast<uint32_t>(DType::f16);
      p.keys = p.capacity = c.keys, p.sequences = c.sequences, p.tokens = c.tokens;
      p.keeps_scratch = c.keeps_scratch ? 1 : 0;
      const abi::AttentionPlan plan = cuda::plan_attention(p, kH200);
      const bool unpacks = c.unpacks && format != KvFormat::f16;
      EXPECT_EQ(plan.kernel, abi::AttentionKernel::attention_many_rows);
      EXPECT_EQ(plan.ahead != 0, unpacks);
      EXPECT_EQ(plan.behind != 0, unpacks && !c.all);
      EXPECT_EQ(plan.unpacked_room != 0, unpacks);
      EXPECT_EQ(plan.scratch_floats != 0, unpacks);
      EXPECT_LE(plan.scratch_floats * 4, (c.keeps_scratch ? uint64_t{640} : 32) << 20);
      if (!unpacks) continue;
      // All have room, or another command takes what has none: if it pays is seen on the device.
      const uint64_t room = plan.unpacked_room * abi::kKvTile;
      EXPECT_EQ(plan.unpacked_work != 0, plan.behind != 0);
      EXPECT_TRUE(plan.behind != 0 || room >= c.keys * c.sequences);
      EXPECT_GE(plan.scratch_floats * 4, room * p.kv_heads * 2 * 128 * 2);
    }
  }
}

TEST(CudaPlanner, Pages) {
  const auto plan_of = [](const abi::AttentionProblem& p) {
    return cuda::plan_attention(p, kH200);
  };
  const auto expect_rows = [&](const abi::AttentionProblem& p, uint32_t rows) {
    const abi::AttentionPlan plan = plan_of(p);
    ASSERT_EQ(plan.kernel, abi::AttentionKernel::attention_decode);
    const auto spec = spec_from_key<abi::AttentionDecodeSpec>(plan.spec);
    EXPECT_EQ(spec.rows, rows);
    EXPECT_EQ(spec.paged, 2);
    EXPECT_EQ(spec.cluster, 1);
    EXPECT_EQ(plan.reduce, abi::AttentionReduce::in_kernel);
    EXPECT_EQ(plan.schedule.blocks, kH200.multiprocessors);
    EXPECT_EQ(plan.schedule.rows, rows);
    // Whole groups of splits, of a power of two of keys.
    EXPECT_EQ(std::popcount(plan.schedule.group.fewest_keys), 1);
    EXPECT_EQ(std::popcount(plan.schedule.group.max_splits), 1);
    // The states of a work item's groups for every block; no more for more sequences.
    const uint64_t state = uint64_t{rows} * p.k.head_dim;
    EXPECT_GE(plan.scratch_floats, plan.schedule.blocks * plan.schedule.group.max_splits * state);
    abi::AttentionProblem longer = p;
    longer.sequences *= 64;
    EXPECT_EQ(plan_of(longer).scratch_floats, plan.scratch_floats);
    EXPECT_EQ(cuda::name_attention_decode(plan.spec).find("gyre::cuda::attention_decode_paged<"),
              0u);
  };
  expect_rows(paged_problem(KvFormat::tq4, 32, 128, 1), 4);
  expect_rows(paged_problem(KvFormat::tq4, 32, 128, 2), 8);
  expect_rows(paged_problem(KvFormat::tq4, 32, 128, 512), 16);
  expect_rows(paged_problem(KvFormat::tq4, 16, 256, 512), 8);
  expect_rows(paged_problem(KvFormat::f16, 32, 128, 1), 8);
  expect_rows(paged_problem(KvFormat::f16, 32, 128, 512), 16);
  expect_rows(paged_problem(KvFormat::tq3, 32, 80, 1), 4);
  expect_rows(paged_problem(KvFormat::tq4, 32, 64, 1), 4);
  expect_rows(paged_problem(KvFormat::tq4, 32, 64, 512), 16);
  expect_rows(paged_problem(KvFormat::tq3, 32, 128, 2), 8);
  expect_rows(paged_problem(KvFormat::tq4, 64, 64, 512), 16);
  // Up to four rows keys are cut, and over small formats taken, otherwise: single tokens have a
  // command of their own in every batch.
  EXPECT_EQ(plan_of(paged_problem(KvFormat::tq8, 32, 128, 1)).own_rows, 0u);
  EXPECT_EQ(plan_of(paged_problem(KvFormat::tq8, 32, 128, 2)).own_rows, 4u);
  EXPECT_EQ(plan_of(paged_problem(KvFormat::tq8, 24, 128, 2)).own_rows, 3u);
  EXPECT_EQ(plan_of(paged_problem(KvFormat::tq8, 64, 128, 2)).own_rows, 0u);
  EXPECT_EQ(plan_of(paged_problem(KvFormat::f16, 32, 128, 4)).own_rows, 8u);
  // Drafts of as many rows as a block holds are decode's.
  const auto drafts_from = [&](KvFormat format, uint32_t heads, uint32_t dim) {
    abi::AttentionProblem of = paged_problem(format, heads, dim, 8);
    of.phase = abi::AttentionPhase::drafts, of.q_dtype = static_cast<uint32_t>(DType::f16);
    return plan_of(of).drafts;
  };
  EXPECT_EQ(drafts_from(KvFormat::tq4, 32, 128), 17u);
  EXPECT_EQ(drafts_from(KvFormat::f16, 32, 128), 17u);
  EXPECT_EQ(drafts_from(KvFormat::tq4, 24, 256), 9u);
  EXPECT_EQ(drafts_from(KvFormat::tq4, 256, 128), 9u);
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
  // More rows than there are counters for: no splits, whose states need one for each.
  EXPECT_EQ(h200.of({.heads = 20, .kv_heads = 20, .keys = 65536, .formats = "tq4"}),
            "decode 4 rows, 6 splits, in kernel");
  EXPECT_EQ(h200.of({.heads = 4100, .kv_heads = 4100, .keys = 65536, .formats = "tq4"}),
            "decode 4 rows, 1 splits");
}

}  // namespace
}  // namespace gyre::test
