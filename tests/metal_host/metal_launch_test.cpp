// What Metal kernels ask of a GPU: bytes of the cache, threads, threadgroup memory.
#include <numeric>

#include "abi/attention_plan.h"
#include "abi/hadamard.h"
#include "abi/kv_dequantize.h"
#include "abi/kv_feedback.h"
#include "abi/rope_append.h"
#include "gyre_test.h"
#include "metal/kernels.h"
#include "metal/kernels/attention_layout.h"
#include "metal_host/host_kernel.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

constexpr uint32_t kMaxThreads = 1024, kMaxGroupBytes = 32768;

bool can_store(KvFormat format, uint64_t head_dim) {
  try {
    kv_codes_shape({format, KvRole::k, 1, 8, head_dim});
    return true;
  } catch (const Error&) {
    return false;
  }
}

// One token's attention over some keys of a format; how many bytes of codes and scales it reads.
class Decoding {
 public:
  static constexpr uint64_t kKvHeads = 2, kKeys = 512, kPageTokens = 64;

  Decoding(KvFormat format, uint64_t head_dim, uint64_t keys = kKeys, uint64_t group = 4)
      : format_(format), head_dim_(head_dim), keys_(keys), group_(group) {}

  // Codes and scales of some tokens, K and V.
  uint64_t bytes(uint64_t tokens) const {
    return half(KvRole::k, tokens).bytes() + half(KvRole::v, tokens).bytes();
  }
  uint64_t read_from_cache(uint64_t ring_start) const {
    const AttentionInputs in{.q = row(),
                             .k_cache = half(KvRole::k, kKeys),
                             .v_cache = half(KvRole::v, kKeys),
                             .out = row()};
    return counted([&](Encoder& encoder) {
      attention(encoder, in, {.length = kKeys, .ring_start = ring_start});
    });
  }
  uint64_t read_from_pages() const {
    const uint64_t pages = keys_ / kPageTokens;
    const KvPageShape shape{.k = format_,
                            .v = format_,
                            .kv_heads = kKvHeads,
                            .head_dim = head_dim_,
                            .page_tokens = kPageTokens};
    const PagedAttentionInputs in{.q = row(),
                                  .pages = KvPages::allocate(device_, shape, pages),
                                  .page_table = device_.tensor(DType::i32, {1, pages}),
                                  .kv_lengths = device_.tensor(DType::i32, {1}),
                                  .cu_seqlens_q = device_.tensor(DType::i32, {2}),
                                  .out = row()};
    std::vector<int32_t> table(pages);
    std::iota(table.rbegin(), table.rend(), 0);
    in.page_table.write_from<int32_t>(table);
    in.kv_lengths.write_from<int32_t>(std::vector<int32_t>{static_cast<int32_t>(keys_)});
    in.cu_seqlens_q.write_from<int32_t>(std::vector<int32_t>{0, 1});
    return counted([&](Encoder& encoder) { attention(encoder, in, {}); });
  }

 private:
  Tensor row() const { return device_.tensor(DType::f32, {1, group_ * kKvHeads, head_dim_}); }
  KvBuffer half(KvRole role, uint64_t tokens) const {
    return KvBuffer::allocate(device_, {format_, role, kKvHeads, tokens, head_dim_});
  }
  uint64_t counted(const std::function<void(Encoder&)>& record) const {
    Encoder encoder(device_);
    record(encoder);
    const uint64_t before = metal_host::cache_bytes_read;
    encoder.submit().wait();
    return metal_host::cache_bytes_read - before;
  }

  Device device_ = Device::open("metal");
  KvFormat format_;
  uint64_t head_dim_, keys_;
  uint64_t group_;  // query heads of a KV head
};

// A token over a whole cache: every code and scale once, nothing else of it.
TEST(MetalLaunch, DecodingReadsTheBytesOfTheCacheOnce) {
  for (const KvFormat format : kv_formats()) {
    for (const uint64_t head_dim : {64u, 80u, 128u, 256u, 512u}) {
      if (!can_store(format, head_dim)) continue;
      SCOPED_TRACE(std::string(name(format)) + " " + std::to_string(head_dim));
      const Decoding decoding(format, head_dim);
      const uint64_t all = decoding.bytes(Decoding::kKeys);
      EXPECT_EQ(decoding.read_from_cache(0), all) << "linear";
      EXPECT_EQ(decoding.read_from_cache(200), all) << "ring";
      EXPECT_EQ(decoding.read_from_pages(), all) << "pages";
    }
  }
}

// Query heads beyond a tile of rows walk the cache again.
TEST(MetalLaunch, MoreRowsThanATileReadTheCacheAgain) {
  struct Shape {
    uint64_t head_dim, group, times;
  };
  for (const Shape& shape : {Shape{128, 8, 1}, Shape{128, 16, 2}, Shape{256, 16, 2},
                             Shape{512, 4, 1}, Shape{512, 8, 2}, Shape{512, 16, 4}}) {
    for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
      SCOPED_TRACE(std::string(name(format)) + " " + std::to_string(shape.head_dim) + ", group " +
                   std::to_string(shape.group));
      const Decoding decoding(format, shape.head_dim, Decoding::kKeys, shape.group);
      const uint64_t all = shape.times * decoding.bytes(Decoding::kKeys);
      EXPECT_EQ(decoding.read_from_cache(0), all) << "cache";
      EXPECT_EQ(decoding.read_from_pages(), all) << "pages";
    }
  }
}

// A group to a split of the keys: together they read no byte twice.
TEST(MetalLaunch, PiecesOfPagesReadEveryByteOnce) {
  constexpr uint64_t kLong = 3 * metal::kSplitKeys;
  for (const KvFormat format : kv_formats()) {
    SCOPED_TRACE(name(format));
    const Decoding decoding(format, 256, kLong);
    EXPECT_EQ(decoding.read_from_pages(), decoding.bytes(kLong));
  }
}

// The oldest and the newest keys share a tile, which is then read for each; no more than that.
TEST(MetalLaunch, ARingThatBeginsInsideATileReadsThatTileTwice) {
  for (const KvFormat format : kv_formats()) {
    SCOPED_TRACE(name(format));
    const Decoding decoding(format, 256);
    const uint64_t read = decoding.read_from_cache(203), all = decoding.bytes(Decoding::kKeys);
    EXPECT_GE(read, all);
    EXPECT_LE(read, all + decoding.bytes(8));
  }
}

// Sixteen bytes at a time only where both sides begin at multiples of them.
TEST(MetalLaunch, CopiesFromAndToAnyElement) {
  const Device device = Device::open("metal");
  constexpr uint64_t kTokens = 3, kHeads = 2, kDim = 64, kRow = kTokens * kHeads * kDim;
  for (const uint64_t from : {0u, 1u, 8u}) {
    for (const uint64_t to : {0u, 1u, 8u}) {
      const Tensor source = device.tensor(DType::f16, {kRow + 8});
      const Tensor cache = device.tensor(DType::f16, {kRow + 8});
      Bytes in(source.bytes());
      for (uint64_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7 + i / 256);
      write_bytes(source, in);
      const auto part = [&](const Tensor& x, uint64_t first) {
        return x.slice(0, first, kRow).reshape({kTokens, kHeads, kDim});
      };
      Encoder encoder(device);
      kv_copy(encoder, {.k = part(source, from), .k_cache = part(cache, to)}, {});
      encoder.submit().wait();
      const Bytes out = read_bytes(cache);
      for (uint64_t i = 0; i < 2 * kRow; ++i)
        ASSERT_EQ(out[2 * to + i], in[2 * from + i]) << from << " " << to;
    }
  }
}

abi::KvCacheLayout layout(KvFormat format, KvRole role, uint32_t head_dim) {
  abi::KvCacheLayout of{};
  of.format = static_cast<uint32_t>(format);
  of.role = static_cast<uint32_t>(role);
  of.head_dim = head_dim;
  return of;
}

void expect_fits(const metal::Launch& launch) {
  EXPECT_GT(launch.threads, 0u);
  EXPECT_LE(launch.threads, kMaxThreads);
  EXPECT_LE(launch.threadgroup_bytes, kMaxGroupBytes);
  EXPECT_EQ(launch.threadgroup_bytes % 16, 0u);
}

// The dims of both streams of what stores rows.
abi::WriteParams storing(uint32_t where, uint32_t k_dim, uint32_t v_dim) {
  abi::WriteParams p{};
  p.tokens = 40, p.heads = 4, p.streams = 2, p.where = where;
  if (where == abi::kWriteRange) p.run = abi::slot_run(0, 40, 3, 64);
  if (where == abi::kWriteState) p.places = {2, 5, 64, 64};
  if (where == abi::kWriteSlots) p.pages = {4, 1 << 20, 64, 8};
  for (const uint32_t i : {0u, 1u}) {
    const abi::KvCacheLayout of =
        layout(KvFormat::tq4, i == 0 ? KvRole::k : KvRole::v, i == 0 ? k_dim : v_dim);
    p.stream[i].cache = of;
  }
  return p;
}

abi::RopeParams rotating(uint64_t tokens, uint64_t head_dim) {
  abi::RopeParams p{};
  p.tokens = tokens, p.head_dim = head_dim, p.streams = 2;
  p.stream[0].heads = 32, p.stream[1].heads = 4;
  return p;
}

// A grid counts in 32 bits, a copy in 64: a group takes further heads.
TEST(MetalLaunch, ACopyOfAnyNumberOfHeadsHasGroups) {
  abi::KvCopyParams copy{};
  copy.tokens = 1, copy.streams = 1, copy.stream[0].row_elements = 1;
  for (const uint64_t heads : {uint64_t{5000}, uint64_t{1} << 32, (uint64_t{1} << 32) + 3}) {
    copy.heads = heads;
    EXPECT_EQ(metal::launch_kv_copy(&copy, 0).grid[1], 4096u) << heads;
  }
}

TEST(MetalLaunch, WhatStoresRowsFitsIntoAGroupAtEveryHeadDim) {
  for (uint32_t k_dim = 8; k_dim <= abi::kKvMaxHeadDim; k_dim += 8) {
    for (const uint32_t v_dim : {k_dim, 24u, 512u, abi::kKvMaxHeadDim}) {
      SCOPED_TRACE(std::to_string(k_dim) + " " + std::to_string(v_dim));
      for (const uint32_t where : {abi::kWriteRange, abi::kWriteState, abi::kWriteSlots}) {
        const abi::WriteParams write = storing(where, k_dim, v_dim);
        expect_fits(metal::launch_write(&write, 0));
        if (where == abi::kWriteRange) continue;
        const abi::RopeAppendParams rope_append{rotating(40, k_dim), write};
        expect_fits(metal::launch_rope_append(&rope_append, 0));
      }
    }
  }
}

TEST(MetalLaunch, RowsAloneFitIntoAGroupAtEveryHeadDim) {
  for (uint32_t dim = 2; dim <= 8192; dim += dim < abi::kKvMaxHeadDim ? 2 : dim) {
    SCOPED_TRACE(dim);
    abi::HadamardParams hadamard{};
    hadamard.rows[0] = hadamard.rows[1] = 3, hadamard.head_dim = dim;
    expect_fits(metal::launch_hadamard(&hadamard, 0));
    if (dim <= abi::kRopeMaxHeadDim) {
      for (const uint64_t tokens : {1u, 4096u}) {
        const abi::RopeParams rope = rotating(tokens, dim);
        expect_fits(metal::launch_rope(&rope, 0));
      }
    }
    if (dim > abi::kKvMaxHeadDim || dim % 16 != 0) continue;
    abi::KvDequantizeParams dequantize{};
    dequantize.tokens = 40, dequantize.heads = 4;
    expect_fits(metal::launch_kv_dequantize(&dequantize, 0));
    abi::KvTransformParams transform{};
    transform.tokens = 40, transform.heads = 4, transform.group = 4, transform.head_dim = dim;
    expect_fits(metal::launch_kv_transform(&transform, 0));
    if (!abi::kv_takes_calibration(dim)) continue;
    for (uint32_t gains = 1; gains <= abi::kKvMaxGains; ++gains) {
      abi::KvFeedbackParams encode{};
      encode.tokens = 40, encode.heads = 4;
      for (abi::KvFeedbackStream& stream : encode.stream)
        stream.head_dim = dim, stream.gains = gains;
      expect_fits(metal::launch_kv_feedback(&encode, 0));
    }
  }
}

metal::Launch launch_of(const abi::AttentionPlan& plan, const abi::AttentionParams& p) {
  switch (plan.kernel) {
    case abi::AttentionKernel::attention_decode:
      return metal::launch_attention_decode(&p, plan.spec);
    case abi::AttentionKernel::attention_many_rows:
      return metal::launch_attention_many_rows(&p, plan.spec);
    default:
      return metal::launch_attention(&p, plan.spec);
  }
}

TEST(MetalLaunch, AttentionFitsIntoAGroupAtEveryShape) {
  for (const KvFormat format :
       {KvFormat::f32, KvFormat::f16, KvFormat::tq3, KvFormat::mlx_native8}) {
    for (uint32_t k_dim = 8; k_dim <= 1024; k_dim += 8) {
      for (const uint32_t v_dim : {k_dim, 24u, 512u, 1016u}) {
        for (const uint64_t tokens : {1u, 3u, 40u}) {
          abi::AttentionProblem problem{};
          problem.tokens = tokens, problem.heads = 4, problem.kv_heads = 1;
          problem.keys = problem.capacity = 4096;
          problem.k = layout(format, KvRole::k, k_dim);
          problem.v = layout(format, KvRole::v, v_dim);
          abi::AttentionPlan plan{};
          ASSERT_TRUE(metal::plan_attention(&problem, &plan));
          abi::AttentionParams p{};
          p.tokens = tokens, p.heads = p.group = 4, p.kv_heads = 1, p.splits = plan.splits;
          p.k = problem.k, p.v = problem.v;
          SCOPED_TRACE(std::to_string(k_dim) + " " + std::to_string(v_dim));
          expect_fits(launch_of(plan, p));
        }
      }
    }
  }
}

TEST(MetalLaunch, PlansPiecesOfPages) {
  abi::AttentionProblem problem{};
  problem.tokens = 6, problem.heads = 32, problem.kv_heads = 8;
  problem.sequences = 5, problem.max_query_length = 2, problem.page_tokens = 64;
  problem.keys = problem.capacity = 512;
  problem.k = layout(KvFormat::tq4, KvRole::k, 128);
  problem.v = layout(KvFormat::tq4, KvRole::v, 128);
  problem.phase = abi::AttentionPhase::decode;
  const auto plan_of = [&] {
    abi::AttentionPlan plan{};
    EXPECT_TRUE(metal::plan_attention(&problem, &plan));
    return plan;
  };
  EXPECT_EQ(plan_of().splits, 1u);
  EXPECT_EQ(plan_of().reduce, abi::AttentionReduce::none);
  problem.keys = problem.capacity = 513;
  EXPECT_EQ(plan_of().splits, 2u);
  EXPECT_EQ(plan_of().reduce, abi::AttentionReduce::separate);
  problem.keys = problem.capacity = 1 << 20;
  EXPECT_EQ(plan_of().splits, 32u);
  problem.keys = 600;  // a window may touch three splits
  const abi::AttentionPlan plan = plan_of();
  EXPECT_EQ(plan.splits, 3u);
  // The states of every group of the launch have a place.
  abi::AttentionParams p{};
  p.tokens = 6, p.heads = 32, p.kv_heads = 8, p.group = 4, p.splits = plan.splits;
  p.k = problem.k, p.v = problem.v, p.phase = problem.phase;
  p.table.sequences = 5, p.table.page_tokens = 64, p.partial = abi::kAttentionPartial;
  const metal::Launch launch = metal::launch_attention_decode(&p, plan.spec);
  const uint64_t rows = spec_from_key<abi::AttentionDecodeSpec>(plan.spec).rows;
  EXPECT_EQ(launch.grid[1], 3u);
  EXPECT_EQ(plan.scratch_floats,
            uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2] * rows * 130);
  p.partial = abi::kAttentionMerged;
  const metal::Launch merge = metal::launch_attention_decode(&p, plan.spec);
  EXPECT_EQ(merge.grid[0], launch.grid[0]);
  EXPECT_EQ(merge.grid[1], 1u);
  problem.phase = abi::AttentionPhase::prompt;
  EXPECT_EQ(plan_of().splits, 1u);
  EXPECT_EQ(plan_of().scratch_floats, 0u);
}

TEST(MetalLaunch, PlansByRowsAndHeadDims) {
  abi::AttentionProblem problem{};
  problem.tokens = 1, problem.heads = 32, problem.kv_heads = 8;
  problem.keys = problem.capacity = 32768;
  problem.k = layout(KvFormat::tq4, KvRole::k, 128);
  problem.v = layout(KvFormat::tq4, KvRole::v, 128);
  const auto plan_of = [&] {
    abi::AttentionPlan plan{};
    EXPECT_TRUE(metal::plan_attention(&problem, &plan));
    return plan;
  };
  abi::AttentionPlan plan = plan_of();
  EXPECT_EQ(plan.kernel, abi::AttentionKernel::attention_decode);
  EXPECT_EQ(spec_from_key<abi::AttentionDecodeSpec>(plan.spec).rows, 4u);
  EXPECT_EQ(plan.splits, 32u);  // 256 groups
  EXPECT_EQ(plan.reduce, abi::AttentionReduce::separate);
  problem.keys = 300;  // two splits at most
  EXPECT_EQ(plan_of().splits, 2u);
  problem.tokens = 5;  // 20 rows: a prompt, whose keys are not cut
  plan = plan_of();
  EXPECT_EQ(plan.kernel, abi::AttentionKernel::attention_many_rows);
  EXPECT_EQ(plan.splits, 1u);
  problem.k.head_dim = problem.v.head_dim = 264;
  EXPECT_EQ(plan_of().kernel, abi::AttentionKernel::attention_decode);
  problem.v.head_dim = 24;
  EXPECT_EQ(plan_of().kernel, abi::AttentionKernel::attention);
  problem.v.head_dim = 32;
  EXPECT_EQ(plan_of().kernel, abi::AttentionKernel::attention_decode);
}

}  // namespace
}  // namespace gyre::test
