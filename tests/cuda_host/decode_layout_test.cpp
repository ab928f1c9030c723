// Where decode attention's bytes lie, on devices of every size: what the host asks for is what the
// kernel takes.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/kernels/attention/decode/paged_layout.cuh"
#include "cuda_host/cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/attention/decode/key_reader.cuh"

namespace gyre::cuda {
namespace {

struct Case {
  uint32_t k, v, n, rows, cluster;
};

template <class Do>
void each_case(const Do& run) {
  constexpr uint32_t kFormats[] = {kFormatF16, kFormatBf16, abi::kTq2, abi::kTq3,
                                   abi::kTq4,  abi::kTq5,   abi::kTq6, abi::kTq8};
  for (const uint32_t k : kFormats) {
    for (const uint32_t v : kFormats) {
      for (const uint32_t n : {32, 64, 80, 96, 112, 128, 160, 192, 256, 512}) {
        for (const uint32_t wanted : {1, 5, 9, 13}) {
          const auto rows = static_cast<uint32_t>(decode_block_rows(v, n, wanted));
          for (const uint32_t cluster : {1u, kDecodePair, kDecodeCluster, kDecodePages})
            if (decode_stage(k, v, n, rows, cluster).fits) run(Case{k, v, n, rows, cluster});
        }
      }
    }
  }
}

TEST(DecodePlan, FitsWhateverThereIs) {
  uint32_t planned = 0, without = 0;
  each_case([&](const Case& c) {
    const DecodeSharedLayout layout = decode_shared_layout(c.k, c.v, c.n, c.rows, c.cluster);
    const uint32_t max_warps = decode_max_warps(c.k, c.v, c.n, c.rows, c.cluster);
    const uint32_t stages = decode_stages(layout, max_warps);
    ASSERT_LE(max_warps, kDecodeMaxWarps);
    ASSERT_GE(stages, kDecodeFewestStages);
    for (const uint32_t limit : {48u << 10, 64u << 10, 99u << 10, 163u << 10, 227u << 10}) {
      for (const uint32_t alone : {0u, limit / 2 + 1, limit + 1}) {
        const DecodeBlock block = decode_block(layout, max_warps, limit, alone);
        if (block.warps == 0) {
          ++without;
          ASSERT_LT(limit, layout.ring + layout.warps_per_key * layout.ring_bytes(stages));
          // Many GPUs have 99 KB: what has room there with few stages has room.
          ASSERT_TRUE(limit < 99 << 10 ||
                      limit < layout.ring +
                                  layout.warps_per_key * layout.ring_bytes(kDecodeFewestStages));
          continue;
        }
        ++planned;
        ASSERT_LE(block.warps, max_warps);
        ASSERT_EQ(block.warps % layout.warps_per_key, 0u);
        ASSERT_LE(block.bytes, limit);
        ASSERT_GE(block.bytes, layout.ring + block.warps * layout.ring_bytes(stages));
        ASSERT_TRUE(alone > limit || block.bytes >= alone);
      }
    }
  });
  EXPECT_GT(planned, 30000u);
  EXPECT_GT(without, 0u);
}

TEST(PagedPlan, FitsWhateverThereIs) {
  uint32_t planned = 0;
  each_case([&](const Case& c) {
    if (c.cluster != kDecodePages) return;
    const PagedLayout layout = paged_layout(c.k, c.v, c.n, c.rows);
    ASSERT_GE(layout.stages, kDecodeFewestStages);
    ASSERT_LE(layout.max_warps, kDecodeMaxWarps);
    // Two work items at once on the largest GPUs, one begins while another ends, where that leaves
    // warps.
    const PagedLaunch largest = paged_launch(layout, layout.max_warps, kDecodeMaxBytes);
    ASSERT_EQ(largest.warps, layout.max_warps);
    ASSERT_GE(layout.slots(largest.warps, largest.bytes),
              layout.max_warps == layout.warps_per_key ? 1u : 2u);
    for (const uint32_t limit : {99u << 10, 163u << 10, 227u << 10}) {
      const PagedLaunch block = paged_launch(layout, layout.max_warps, limit);
      if (block.warps == 0) {
        ASSERT_LT(limit, layout.slots_at(layout.warps_per_key) + layout.slot.bytes);
        continue;
      }
      ++planned;
      ASSERT_LE(block.bytes, limit);
      ASSERT_EQ(block.warps % layout.warps_per_key, 0u);
      const uint32_t slots = layout.slots(block.warps, block.bytes);
      ASSERT_GE(slots, 1u);
      ASSERT_EQ(block.bytes, layout.slots_at(block.warps) + slots * layout.slot.bytes);
    }
  });
  EXPECT_GT(planned, 1000u);
}

// Calls share a scratch: the states of all kernels of a GPU begin behind the counters of all.
TEST(PagedScratch, StatesBeginBehindTheCounters) {
  for (uint32_t multiprocessors = 0; multiprocessors <= 4096; ++multiprocessors) {
    const uint32_t blocks = paged_blocks(multiprocessors);
    EXPECT_GE(paged_counter_bytes(blocks), uint64_t{blocks} * 4) << multiprocessors;
    EXPECT_EQ(paged_counter_bytes(blocks) % 16, 0u) << multiprocessors;
  }
}

// What the lanes of a warp read of a key in tiles is every coordinate once, its queries each in the
// scale block that it belongs to.
template <uint32_t kFormat, uint32_t kDim>
void expect_all_coordinates() {
  using Reader = TileKeyReader<kDim, kFormat, false>;
  std::vector<uint32_t> times(kDim + 1);
  for (uint32_t step = 0; step < Reader::kSteps; ++step) {
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t at = Reader::coordinate(i % 4, step, i / 4);
      ++times[at];
      if (at == kDim) continue;
      const uint32_t block = scale_block_of(kDim, at);
      EXPECT_TRUE(Reader::kSlots.used[step][block]) << kFormat << " " << kDim << " " << at;
    }
  }
  times[kDim] = 1;
  EXPECT_EQ(times, std::vector<uint32_t>(kDim + 1, 1)) << kFormat << " " << kDim;
}
template <uint32_t kFormat>
void expect_all_dims() {
  expect_all_coordinates<kFormat, 32>();
  expect_all_coordinates<kFormat, 48>();
  expect_all_coordinates<kFormat, 64>();
  expect_all_coordinates<kFormat, 80>();
  expect_all_coordinates<kFormat, 96>();
  expect_all_coordinates<kFormat, 112>();
  expect_all_coordinates<kFormat, 160>();
  expect_all_coordinates<kFormat, 192>();
  expect_all_coordinates<kFormat, 240>();
}
TEST(DecodeTiles, HaveEveryCoordinateOnce) {
  expect_all_dims<abi::kTq2>();
  expect_all_dims<abi::kTq3>();
  expect_all_dims<abi::kTq4>();
  expect_all_dims<abi::kTq5>();
  expect_all_dims<abi::kTq6>();
  expect_all_dims<abi::kTq8>();
}

// Measured to do better there, and not elsewhere.
TEST(DecodePlan, HasTwelveWarpsForTq4) {
  const auto warps = [](uint32_t format, uint32_t n, uint32_t rows, uint32_t cluster) {
    return decode_max_warps(format, format, n, rows, cluster);
  };
  EXPECT_EQ(warps(abi::kTq4, 128, 4, 1), 12u);
  EXPECT_EQ(warps(abi::kTq3, 128, 4, 1), 12u);
  EXPECT_EQ(warps(abi::kTq4, 128, 8, 1), 8u);
  EXPECT_EQ(warps(abi::kTq4, 128, 4, 8), 8u);
  EXPECT_EQ(warps(abi::kTq8, 128, 4, 1), 8u);
  EXPECT_EQ(warps(abi::kTq4, 64, 4, 1), 8u);
}

// Where there is room for everything, every case has all of its warps.
TEST(DecodePlan, HasAllWarpsWhereThereIsRoom) {
  each_case([](const Case& c) {
    const DecodeSharedLayout layout = decode_shared_layout(c.k, c.v, c.n, c.rows, c.cluster);
    const uint32_t warps = decode_max_warps(c.k, c.v, c.n, c.rows, c.cluster);
    EXPECT_EQ(decode_block(layout, warps, kDecodeMaxBytes, 0).warps,
              warps / layout.warps_per_key * layout.warps_per_key)
        << c.k << " " << c.v << " " << c.n << " " << c.rows << " " << c.cluster;
  });
}

}  // namespace
}  // namespace gyre::cuda
