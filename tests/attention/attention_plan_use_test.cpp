// What ops do with a plan, and the plans of a CPU.
#include "attention/plan_device.h"
#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/planner.h"
#include "cpu/device.h"
#include "cpu/kernels.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

using abi::AttentionKernel;
using abi::AttentionReduce;

TEST(AttentionPlan, ScratchHoldsCountersAndStates) {
  CudaPlans plans(kH200);
  plans.of({.keys = 32768, .formats = "tq4"});
  EXPECT_EQ(plans.plan().scratch_floats, 4096 + 16 * 32 * 130u);
  EXPECT_EQ(plans.plan().fewest_split_keys, 128u);
  plans.of({.formats = "tq4"});
  EXPECT_EQ(plans.plan().scratch_floats, 0u);
  plans.of({.formats = "f32"});
  EXPECT_EQ(plans.plan().scratch_floats, 32 * 32 * 130u);
}

// The params' side of a plan.
TEST(AttentionPlan, ParamsFollowThePlan) {
  CudaPlans plans(kH200);
  plans.of({.formats = "tq4"});
  EXPECT_EQ(plans.impl().params().back().partial, abi::kAttentionWhole);
  EXPECT_EQ(plans.impl().params().back().splits, 8u);
  plans.of({.keys = 32768, .formats = "tq4"});
  EXPECT_EQ(plans.impl().params().back().partial, abi::kAttentionMerged);
  EXPECT_EQ(plans.impl().params().back().split_keys, 2048u);
  plans.of({.formats = "f32"});
  EXPECT_EQ(plans.impl().params().back().partial, abi::kAttentionPartial);
  EXPECT_EQ(plans.impl().params().back().fewest_split_keys, 128u);
  EXPECT_EQ(plans.impl().recorded().back()->kernel, &kAttentionMerge.info);
}

// Recording asks for the pipelines of its commands and for no other.
TEST(AttentionPlan, RecordingBuildsWhatItDispatches) {
  CudaPlans plans(kH200);
  const auto cache_of = [&](const KvLayer& layer, uint64_t capacity) {
    return KvCache(plans.device(),
                   {.kv_heads = 8, .head_dim = 128, .capacity = capacity, .layers = {layer}});
  };
  const auto attend = [&](const KvCache& cache, uint64_t tokens) {
    const Tensor q = plans.device().tensor(DType::f16, {tokens, 32, 128});
    Encoder encoder(plans.device());
    cache.attend(encoder, 0, {.q = q, .out = plans.device().tensor(DType::f16, q.shape())});
    encoder.instantiate();  // no step is begun
  };
  for (const char* formats : {"tq4", "f16", "f32"}) {
    for (const uint64_t keys : {100, 4096, 32768}) plans.of({.keys = keys, .formats = formats});
  }
  plans.of({.formats = "tq8", .splits = 3});
  const KvLayer plain{.k = KvFormat::tq4, .v = KvFormat::tq4};
  const KvLayer ends{.k = KvFormat::tq4, .v = KvFormat::tq4, .tail = 64, .sink_tokens = 4};
  for (const uint64_t tokens : {1, 17}) {
    attend(cache_of(plain, 4096), tokens);
    attend(cache_of(ends, 4096), tokens);
  }
  const auto distinct = [](const std::vector<const Pipeline*>& all) {
    return std::set<const Pipeline*>(all.begin(), all.end());
  };
  EXPECT_EQ(plans.impl().recorded().size(), 24u);
  EXPECT_EQ(distinct(plans.impl().asked()), distinct(plans.impl().recorded()));
}

// A step that only decodes has one command beside its schedule. Prompts take another one, even of
// one token: their bits must not depend on their chunks, nor on longer sequences of the batch.
// Ahead of prompts over levels a command unpacks them.
TEST(AttentionPlan, PromptsAreACommandOfTheirOwn) {
  const auto kernels_of = [](bool prompts, uint64_t max_query_length, uint64_t min_query_length) {
    CudaPlans plans(kH200);
    const Device& device = plans.device();
    const KvPages pages =
        KvPages::allocate(device, {KvFormat::tq4, KvFormat::tq4, 8, 128, 0, 64}, 64);
    const uint64_t tokens = 2 * max_query_length;
    const Tensor q = device.tensor(DType::bf16, {tokens, 32, 128});
    PagedAttentionInputs in{.q = q,
                            .pages = pages,
                            .page_table = device.tensor(DType::i32, {2, 32}),
                            .kv_lengths = device.tensor(DType::i32, {2}),
                            .cu_seqlens_q = device.tensor(DType::i32, {3}),
                            .out = device.tensor(DType::bf16, q.shape())};
    if (prompts) in.is_prefill = device.tensor(DType::u8, {2});
    PagedAttentionOptions options;
    options.max_query_length = max_query_length, options.min_query_length = min_query_length;
    Encoder encoder(device);
    attention(encoder, in, options);
    encoder.submit();
    std::string names;
    for (const Pipeline* pipeline : plans.impl().recorded())
      names += std::string(names.empty() ? "" : " ") + pipeline->kernel->name;
    return names;
  };
  const std::string decode = "attention_schedule attention_decode",
                    drafts = "attention_schedule attention_many_rows";
  EXPECT_EQ(kernels_of(false, 1, 1), decode);
  EXPECT_EQ(kernels_of(true, 1, 1), decode + " attention_many_rows");
  EXPECT_EQ(kernels_of(false, 5, 5), drafts);
  EXPECT_EQ(kernels_of(true, 5, 5), drafts + " attention_many_rows");
  const std::string unpacked = " attention_many_rows attention_many_rows";
  // Single tokens beside sequences of two have a command of their own.
  EXPECT_EQ(kernels_of(false, 512, 1), drafts + " " + decode + unpacked + " " + decode);
  EXPECT_EQ(kernels_of(false, 2, 1), decode + " " + decode);
  EXPECT_EQ(kernels_of(false, 2, 2), decode);
  EXPECT_EQ(kernels_of(false, 4, 3), decode);
}

// Sink tokens and tail are splits of their own, behind those of the body; one merge takes them all.
TEST(AttentionPlan, SegmentsOfACache) {
  CudaPlans plans(kH200);
  const KvLayer layer{.k = KvFormat::tq4, .v = KvFormat::tq4, .tail = 64, .sink_tokens = 4};
  const KvCache cache(plans.device(),
                      {.kv_heads = 8, .head_dim = 128, .capacity = 4096, .layers = {layer}});
  const Tensor q = plans.device().tensor(DType::f16, {1, 32, 128});
  Encoder encoder(plans.device());
  cache.attend(encoder, 0, {.q = q, .out = plans.device().tensor(DType::f16, q.shape())});
  encoder.instantiate();  // no step is begun
  const auto& params = plans.impl().params();
  ASSERT_EQ(params.size(), 3u);
  for (const abi::AttentionParams& p : params) {
    EXPECT_EQ(p.partial, abi::kAttentionPartial);
    EXPECT_EQ(p.splits, p.segment == abi::kSegmentBody ? 16u : 1u);
  }
  EXPECT_EQ(plans.impl().recorded().back()->kernel, &kAttentionMerge.info);
}

// A kernel that reduces splits itself finds its counters as it left them, whatever other layers do.
TEST(AttentionPlan, ScratchOfAKernelIsItsOwn) {
  CudaPlans plans(kH200);
  const KvLayer plain{.k = KvFormat::tq4, .v = KvFormat::tq4};
  const KvLayer ends{.k = KvFormat::tq4, .v = KvFormat::tq4, .tail = 64, .sink_tokens = 4};
  const KvCache cache(
      plans.device(),
      {.kv_heads = 8, .head_dim = 128, .capacity = 32768, .layers = {plain, ends, plain}});
  const Tensor q = plans.device().tensor(DType::f16, {1, 32, 128});
  Encoder encoder(plans.device());
  for (uint64_t layer = 0; layer < 3; ++layer)
    cache.attend(encoder, layer, {.q = q, .out = plans.device().tensor(DType::f16, q.shape())});
  encoder.instantiate();  // no step is begun
  const std::vector<uint64_t>& at = plans.impl().partials();
  ASSERT_EQ(at.size(), 5u);
  EXPECT_EQ(text_of(plans.plan()), "decode 4 rows, 16 splits, in kernel");
  EXPECT_EQ(at[4], at[0]);
  const uint64_t scratch_bytes = plans.plan().scratch_floats * sizeof(float);
  const uint64_t state_bytes = 18 * 32 * 130 * sizeof(float);
  EXPECT_TRUE(at[1] >= at[0] + scratch_bytes || at[1] + state_bytes <= at[0]);
  EXPECT_EQ(at[2] - at[1], 16 * 32 * 130 * sizeof(float));
  EXPECT_EQ(at[3] - at[2], 32 * 130 * sizeof(float));
}

abi::AttentionProblem cpu_problem(uint64_t tokens, uint64_t heads, uint64_t kv_heads,
                                  uint64_t keys) {
  abi::AttentionProblem p{};
  p.tokens = tokens, p.heads = heads, p.kv_heads = kv_heads;
  p.capacity = p.keys = keys;
  p.k.format = p.v.format = abi::kTq4;
  p.k.head_dim = p.v.head_dim = 128;
  p.out_dtype = static_cast<uint32_t>(DType::bf16);
  return p;
}

abi::AttentionPlan cpu_plan(const abi::AttentionProblem& problem, uint32_t threads = 2) {
  DeviceInfo device;
  device.compute_units = threads;
  abi::AttentionPlan plan{};
  EXPECT_TRUE(cpu::plan_attention(&problem, device, &plan));
  return plan;
}

// Few rows: a piece for every 1024 keys, which may begin anywhere, at most 16. Prompts are not cut.
TEST(CpuPlanner, Pieces) {
  struct Row {
    uint64_t tokens, heads, kv_heads, keys, pieces;
  };
  for (const Row& row : std::initializer_list<Row>{{1, 32, 8, 0, 1},
                                                   {1, 32, 8, 1, 1},
                                                   {1, 32, 8, 1024, 1},
                                                   {1, 32, 8, 1025, 3},
                                                   {1, 32, 8, 4096, 5},
                                                   {1, 32, 8, 131072, 16},
                                                   {1, 4, 1, 131072, 16},
                                                   {1, 256, 64, 131072, 16},
                                                   {4, 32, 8, 131072, 16},  // 16 rows
                                                   {5, 32, 8, 131072, 1},
                                                   {1, 34, 2, 131072, 1},  // 17 rows
                                                   {4096, 32, 8, 4096, 1}}) {
    const abi::AttentionPlan plan =
        cpu_plan(cpu_problem(row.tokens, row.heads, row.kv_heads, row.keys));
    EXPECT_EQ(plan.splits, row.pieces) << row.tokens << " tokens, " << row.heads << "/"
                                       << row.kv_heads << " heads, " << row.keys << " keys";
    EXPECT_EQ(plan.kernel, AttentionKernel::attention);
    EXPECT_EQ(plan.reduce, row.pieces == 1 ? AttentionReduce::none : AttentionReduce::in_kernel);
    const uint64_t counters = (row.kv_heads + 15) / 16 * 16;
    EXPECT_EQ(plan.scratch_floats,
              row.pieces == 1 ? 0 : counters + row.pieces * row.tokens * row.heads * 130);
    EXPECT_EQ(plan.fewest_split_keys, 1024u);
  }
}

// A batch may hold sequences that decode beside prompts: up to 16 rows of each are kept.
TEST(CpuPlanner, Batches) {
  abi::AttentionProblem problem = cpu_problem(600, 32, 8, 131072);
  problem.sequences = 64;
  problem.page_tokens = 64;
  for (const uint32_t queries : {1u, 3u, 512u}) {
    problem.max_query_length = queries;
    const abi::AttentionPlan plan = cpu_plan(problem);
    EXPECT_EQ(plan.splits, 16u);
    EXPECT_EQ(plan.reduce, AttentionReduce::in_kernel);
    const uint64_t rows = queries == 512 ? 16 : 4 * queries;
    EXPECT_EQ(plan.scratch_floats, 64 * 8 * (1 + 16 * rows * 130));
    EXPECT_EQ(spec_from_key<abi::AttentionSpec>(plan.spec).paged, 1);
  }
}

TEST(CpuPlanner, DoesNotLookAtThreads) {
  for (const uint64_t keys : {1, 3000, 131072}) {
    const abi::AttentionProblem problem = cpu_problem(1, 32, 8, keys);
    const std::string one = text_of(cpu_plan(problem, 1));
    for (const uint32_t threads : {0, 3, 64, 1024})
      EXPECT_EQ(text_of(cpu_plan(problem, threads)), one) << threads;
  }
}

// What attention_partial's caller says; and whose states, which are f32.
TEST(CpuPlanner, SpecsAndSplitsOfTheCaller) {
  abi::AttentionProblem problem = cpu_problem(1, 32, 8, 4096);
  const auto out_of = [](const abi::AttentionPlan& plan) {
    return static_cast<DType>(spec_from_key<abi::AttentionSpec>(plan.spec).out_dtype);
  };
  EXPECT_EQ(out_of(cpu_plan(problem)), DType::bf16);
  problem.states = 1, problem.splits = 7, problem.out_dtype = 0;
  const abi::AttentionPlan plan = cpu_plan(problem);
  EXPECT_EQ(plan.splits, 7u);
  EXPECT_EQ(plan.reduce, AttentionReduce::none);
  EXPECT_EQ(plan.scratch_floats, 0u);
}

// The first of two tasks, and no other.
cpu::TaskFn whole_attention = nullptr;
void run_first_half(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  whole_attention(params, args, 0, 2);
}
cpu::TaskFn select_first_half(uint64_t spec) {
  whole_attention = cpu::select_attention(spec);
  return run_first_half;
}

// How many of a prompt's 256 queries, before 32 sequences that decode, the first task takes.
uint64_t prompt_rows_of_first_task(KvFormat format) {
  constexpr uint64_t kPrompt = 256, kDecodes = 32, kLength = 512, kDim = 64;
  std::vector<cpu::CpuKernel> table(cpu::kernel_table().begin(), cpu::kernel_table().end());
  for (cpu::CpuKernel& row : table) {
    if (row.info != &kAttention.info) continue;
    row.select = select_first_half;
    row.tasks = [](const void*, uint64_t) -> uint32_t { return 1; };
  }
  const Device device = device_of(cpu::make_device({.threads = 1}, table));
  const auto integers = [&](const std::vector<int32_t>& values, const Dims& shape) {
    const Tensor made = device.tensor(DType::i32, shape);
    made.write_from(std::span<const int32_t>(values));
    return made;
  };
  std::vector<int32_t> begin = {0};
  for (uint64_t i = 0; i <= kDecodes; ++i) begin.push_back(static_cast<int32_t>(kPrompt + i));
  const Dims shape = {kPrompt + kDecodes, 1, kDim};
  const Tensor out = device.tensor(DType::f32, shape);
  std::vector<float> rows(out.elements(), 7.0f);
  out.write_from(std::span<const float>(rows));
  const KvPages pages = KvPages::allocate(
      device, {.k = format, .v = format, .kv_heads = 1, .head_dim = kDim, .page_tokens = kLength},
      1);
  Encoder encoder(device);
  attention(encoder,
            {.q = device.tensor(DType::f32, shape),
             .pages = pages,
             .page_table = integers(std::vector<int32_t>(kDecodes + 1), {kDecodes + 1, 1}),
             .kv_lengths = integers(std::vector<int32_t>(kDecodes + 1, kLength), {kDecodes + 1}),
             .cu_seqlens_q = integers(begin, {kDecodes + 2}),
             .out = out},
            {.max_query_length = kPrompt});
  encoder.submit().wait();
  out.read_to(std::span(rows));
  uint64_t written = 0;
  for (uint64_t row = 0; row < kPrompt; ++row) written += rows[row * kDim] != 7.0f ? 1 : 0;
  return written;
}

// Prompts with matrix instructions cost what decoding costs, not what f32 does.
TEST(CpuShares, FollowTheCostOfAPrompt) {
  for (const cpu::AttentionKernels& set : cpu::attention_kernel_sets()) {
    if (set.prompt_rows > cpu::kTileRows) continue;  // all 256 are one item
    cpu::use_attention_kernels(set);
    EXPECT_EQ(prompt_rows_of_first_task(KvFormat::f16), set.score_prompt != nullptr ? 192u : 128u)
        << set.name;
    EXPECT_EQ(prompt_rows_of_first_task(KvFormat::tq8), set.score_levels != nullptr ? 192u : 128u)
        << set.name;
  }
  cpu::use_attention_kernels(cpu::attention_kernel_sets()[0]);
}

// A device without a planner keeps the op's default: the kernel for any shape, one split.
TEST(NoPlanner, TheDefaultStands) {
  const auto impl = std::make_shared<PlanDevice>(PlanDevice::Planner{});
  const Device device = device_of(impl);
  const Tensor q = device.tensor(DType::f16, {1, 32, 128});
  const Tensor partial = device.tensor(DType::f32, attention_partial_shape(5, q.shape(), 128));
  const KvBuffer k = KvBuffer::allocate(device, {KvFormat::tq4, KvRole::k, 8, 32768, 128});
  const KvBuffer v = KvBuffer::allocate(device, {KvFormat::tq4, KvRole::v, 8, 32768, 128});
  Encoder encoder(device);
  attention(encoder,
            {.q = q, .k_cache = k, .v_cache = v, .out = device.tensor(DType::f16, {1, 32, 128})},
            {.length = 32768});
  attention_partial(encoder, {.q = q, .k_cache = k, .v_cache = v, .partial = partial},
                    {.length = 32768});
  encoder.submit();
  ASSERT_EQ(impl->recorded().size(), 2u);
  for (const Pipeline* pipeline : impl->recorded()) EXPECT_EQ(pipeline->kernel, &kAttention.info);
  EXPECT_EQ(impl->params()[0].splits, 1u);
  EXPECT_EQ(impl->params()[0].partial, abi::kAttentionWhole);
  EXPECT_EQ(impl->params()[1].splits, 5u);
  EXPECT_EQ(impl->params()[1].partial, abi::kAttentionPartial);
}

}  // namespace
}  // namespace gyre::test
