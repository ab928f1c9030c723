// Functions of the kernels' text by themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "abi/attention_cut.h"
#include "cuda/kernels.h"
#include "cuda_host/cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/attention/schedule.cu"
#include "cuda/kernels/encode.cuh"
#include "cuda/kernels/encode_work.cuh"

namespace gyre::cuda {
namespace {

// The kernels find a magnitude's index by a polynomial; the format by thresholds.
template <uint32_t kBits, size_t kCount>
void check_indices(const uint8_t (&thresholds)[kCount]) {
  const auto check = [&](float v) {
    uint32_t index = 0;
    for (const uint8_t threshold : thresholds) index += v > static_cast<float>(threshold) ? 1 : 0;
    EXPECT_EQ(magnitude_index<kBits>(v) >> 16 & 0xFF, index) << kBits << " bits, " << v;
  };
  for (uint32_t i = 0; i <= 2048; ++i) {  // beyond every doubled magnitude
    const auto v = static_cast<float>(i);
    check(v), check(std::nextafter(v, 1e9f)), check(std::fabs(std::nextafter(v, -1.0f)));
    check(v + 0.5f);
  }
}

TEST(KernelText, MagnitudeIndexIsTheOneThatThresholdsGive) {
  check_indices<2>(abi::kTq2Thresholds);
  check_indices<3>(abi::kTq3Thresholds);
  check_indices<4>(abi::kTq4Thresholds);
}

// The schedule cuts as abi/attention_cut.h says: scratch has room for that many groups.
TEST(KernelText, GroupsAreThoseOfTheCut) {
  const abi::AttentionCut cut = {1024, 16};
  std::vector<uint32_t> lengths = {0, 1, 2, 1023, 1024, 1025};
  for (uint32_t power = 1 << 11; power <= 1u << 28; power *= 2)
    lengths.insert(lengths.end(), {power - 1, power, power + 1, power / 2 * 3});
  for (const uint32_t length : lengths) {
    const uint32_t shift = cut_shift({cut.fewest_keys, cut.max_splits}, length);
    EXPECT_EQ(uint64_t{1} << shift, abi::sequence_split_keys(cut, length)) << length;
    EXPECT_LE((uint64_t{length} + (uint64_t{1} << shift) - 1) >> shift, cut.max_splits) << length;
  }
}

// Tiles fit into shared memory, and a larger GPU gives them no fewer rows.
TEST(KernelText, TilesOfCalibratedRowsFitIntoEveryGpu) {
  const auto rows_of = [](uint32_t n, uint32_t gains, const CudaLimits& limits) {
    abi::KvFeedbackParams p{512, 8, {}};
    for (abi::KvFeedbackStream& s : p.stream) s.head_dim = n, s.gains = gains;
    if (!encode_takes_tiles(p)) return 0u;
    const Launch how = launch_kv_feedback(&p, 0, limits);
    EXPECT_LE(how.shared_bytes + 1024, limits.shared_bytes_per_block) << n << " " << gains;
    return how.block / kEncodeRowThreads;
  };
  const CudaLimits small{84, 99 << 10, 100 << 10, 89}, hopper{132, 227 << 10, 228 << 10, 90};
  for (const uint32_t n : {16u, 32u, 64u, 128u, 256u}) {
    for (uint32_t gains = 1; gains <= abi::kKvMaxGains; ++gains) {
      const uint32_t few = rows_of(n, gains, small), many = rows_of(n, gains, hopper);
      EXPECT_EQ(few == 0, many == 0) << n << " " << gains;
      EXPECT_LE(few, many) << n << " " << gains;
      EXPECT_TRUE(n > 128 || few >= kEncodeLeastTileRows) << n << " " << gains;
    }
  }
}

}  // namespace
}  // namespace gyre::cuda
