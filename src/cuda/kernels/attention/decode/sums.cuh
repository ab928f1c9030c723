#pragma once
// Decode attention: what a warp sums up while it walks the keys. Over levels a weight is
// probability times the V scale, as a 16-bit integer in fixed point, so that sums stay integers
// from the first key to the last. Over 16-bit V it is the probability.
#include "cuda/kernels/attention/common/fixed_point.cuh"
#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/attention/decode/key_quads.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

// The state of a row over levels, the same in its eight lanes but for max and sum. `reference` is a
// logit.
struct LevelRow {
  float reference, max, sum;

  static LevelRow none() { return {kLowest, minus_infinity(), 0}; }
};
// Dither: weights are rounded up or down as often as their fraction says, so that many weights far
// below 1 count for what they are. It differs from lane to lane and from stage to stage. `selector`
// and `source` are transpose_weights'; `surplus` is what the bits of kIntegers add to the lane's
// sum of weights.
struct LaneWeights {
  float dither;
  uint32_t selector, source, surplus;

  // The golden ratio covers [0, 1) evenly. `keys` were added to the sum.
  void step(uint32_t keys) {
    dither += dither < 0.381966f ? 0.618034f : -0.381966f;
    surplus += keys * kIntegers;
  }
};
inline LaneWeights lane_weights() {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  return {(static_cast<float>(g) + 0.5f) * 0.125f, g % 2 == 0 ? 0x7632u : 0x5410u,
          8 * j + g % 2 * 4 + g / 2, 0};
}

// What a warp sums up over levels: coordinates 32 (i / 2) + 4 g + 2 (i % 2), and the next, of row
// 4 four + j in sums[four][i]: those of the upper and of the lower weight bytes of each. The last
// span may have coordinates that do not exist.
template <class Traits>
struct LevelSums {
  struct BlockTable {
    uint32_t of[2 * ((Traits::kValueSlice + 31) / 32)];

    static constexpr BlockTable make() {
      BlockTable table = {};
      for (uint32_t i = 0; Traits::kWarpBlocksV > 1 && i < Traits::kValueDim; i += 16)
        table.of[i / 16] = scale_block_of(Traits::kValueDim, i);
      if (Traits::kWarpBlocksV > 1 && Traits::kValueDim % 32 != 0)
        table.of[Traits::kValueDim / 16] = table.of[Traits::kValueDim / 16 - 1];
      return table;
    }
  };
  static constexpr BlockTable kBlockTable = BlockTable::make();
  static constexpr uint32_t kRowQuads = Traits::kRows / 4, kBlocks = Traits::kWarpBlocksV;
  static constexpr uint32_t kSpans = (Traits::kValueSlice + 31) / 32, kSums = 2 * kSpans;
  LevelRow row[kRowQuads];
  FixedPoint fixed[kBlocks][kRowQuads];
  int32_t sums[kRowQuads][kSums][4];
  uint32_t weights[kBlocks][kRowQuads][Traits::kMmas][2];  // of the stage at hand, as B fragments

  // The scale block of sums[...][i].
  static uint32_t block_of(uint32_t i) { return kBlockTable.of[i]; }
  static LevelSums none() {
    LevelSums s = {};
#pragma unroll
    for (uint32_t i = 0; i < kRowQuads; ++i) {
      s.row[i] = LevelRow::none();
#pragma unroll
      for (uint32_t block = 0; block < kBlocks; ++block) s.fixed[block][i] = FixedPoint::none();
    }
    return s;
  }
};

// One fixed-point scale for the sums of a row in all scale blocks: the smallest, so that none
// overflows. Blocks that met infinity or NaN have none.
template <class Traits>
inline float common_scale(const LevelSums<Traits>& from, uint32_t four) {
  if constexpr (Traits::kWarpBlocksV == 1) return from.fixed[0][four].scale;
  float scale = 0x1p126f;
#pragma unroll
  for (uint32_t block = 0; block < Traits::kWarpBlocksV; ++block) {
    const float of = from.fixed[block][four].scale;
    if (of > 0 && of < scale) scale = of;
  }
  return scale;
}
// A row's weights, summed over the warp's keys: as floats, and in each scale block as levels.
template <class Traits>
struct WarpWeights {
  static constexpr uint32_t kBlocks = Traits::kWarpBlocksV;
  float sum;
  uint32_t levels[kBlocks];

  WarpWeights(const LaneWeights& lane_weights, const LevelSums<Traits>& from, uint32_t set)
      : sum(from.row[set].sum) {
#pragma unroll
    for (uint32_t block = 0; block < kBlocks; ++block)
      levels[block] = from.fixed[block][set].weight_sum - lane_weights.surplus;
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
      sum += __shfl_xor_sync(kAll, sum, by);
#pragma unroll
      for (uint32_t block = 0; Traits::FormV::kBias != 0 && block < kBlocks; ++block)
        levels[block] += __shfl_xor_sync(kAll, levels[block], by);
    }
  }
};

// The state of a row over 16-bit V, the same in its four lanes but for the sum.
struct FloatRow {
  float reference, max, sum;

  static FloatRow none() { return {kLowest, minus_infinity(), 0}; }
};

// sums[eight][i]: coordinates 16 i + g and + 8, of rows 8 eight + 2 j and + 1.
template <class Traits>
struct Float16Sums {
  static constexpr uint32_t kRowTiles = row_tiles(Traits::kRows);
  FloatRow row[kRowTiles];
  float sums[kRowTiles][Traits::kValueSlice / 16][4];

  static Float16Sums none() {
    Float16Sums s = {};
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles; ++i) s.row[i] = FloatRow::none();
    return s;
  }
};

// Probabilities over f16 V, at most 2^kFarAbove, are scaled up: small ones stay normal f16.
constexpr int32_t kProbabilityUp = 7;

// A number of row g to the lanes that have sums of rows 2 j and 2 j + 1.
inline float2 transpose_rows(float of_row) {
  const int j = static_cast<int>(threadIdx.x % 4);
  return make_float2(__shfl_sync(kAll, of_row, 8 * j), __shfl_sync(kAll, of_row, 8 * j + 4));
}

}  // namespace gyre::cuda
