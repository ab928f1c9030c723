#pragma once
// Decode attention: what a warp keeps of its queries while it walks the keys.
#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

// Factors of a row's scores, in two steps of which the first is a power of two; `added` in between
// is the sum of the query's coordinates in the slice times the bias of LevelForm.
struct ScoreFactors {
  float first, second, added;
};
// [slice of warps that share keys, or scale block of a warp that has several][row]
using RowFactors = ScoreFactors[decode_warps_per_key(512)][kDecodeMaxRows];

// Score factors of a lane's rows 4 i + j: in registers where there are few, else read from shared
// memory each time. With several scale blocks, each has a second factor of its own.
template <uint32_t kRowQuads, uint32_t kBlocks>
class LevelFactors {
  static constexpr bool kKept = kRowQuads < 4;

 public:
  LevelFactors() = default;
  LevelFactors(const RowFactors& of_slices, uint32_t slice, uint32_t slices)
      : shared_(of_slices[slice] + threadIdx.x % 4) {
#pragma unroll
    for (uint32_t i = 0; kKept && i < kRowQuads; ++i) kept_[i] = shared_[4 * i];
#pragma unroll
    for (uint32_t i = 0; kBlocks > 1 && i < kBlocks * kRowQuads; ++i)
      second_[i] =
          of_slices[i / kRowQuads * (slices / kBlocks)][i % kRowQuads * 4 + threadIdx.x % 4].second;
  }
  ScoreFactors operator[](uint32_t four) const { return kKept ? kept_[four] : shared_[4 * four]; }
  float second(uint32_t block, uint32_t four) const {
    return kBlocks > 1 ? second_[block * kRowQuads + four] : (*this)[four].second;
  }

 private:
  const ScoreFactors* shared_;
  ScoreFactors kept_[kKept ? kRowQuads : 1];
  float second_[kBlocks > 1 ? kBlocks* kRowQuads : 1];
};

// B fragments of all steps: in registers where there are few, else read from shared memory each
// time. kSteps are the warp's, of kAllSteps.
template <uint32_t kRowQuads, uint32_t kSteps, uint32_t kAllSteps>
class QueryColumns {
  static constexpr bool kKept = kRowQuads * kSteps <= 12;

 public:
  QueryColumns() = default;
  QueryColumns(const uint2* shared, uint32_t slice)
      : shared_(shared + slice * kSteps * kWarp + threadIdx.x % kWarp) {
    if constexpr (kKept) {
#pragma unroll
      for (uint32_t i = 0; i < kRowQuads * kSteps; ++i) {
        const uint2 x = shared_[place(i / kSteps, i % kSteps)];
        kept_[i][0] = x.x, kept_[i][1] = x.y;
      }
    }
  }
  void get(uint32_t four, uint32_t step, uint32_t (&b)[2]) const {
    if constexpr (kKept) {
      b[0] = kept_[four * kSteps + step][0], b[1] = kept_[four * kSteps + step][1];
    } else {
      const uint2 x = shared_[place(four, step)];
      b[0] = x.x, b[1] = x.y;
    }
  }

 private:
  static constexpr uint32_t place(uint32_t four, uint32_t step) {
    return (four * kAllSteps + step) * kWarp;
  }
  const uint2* shared_;
  uint32_t kept_[kKept ? kRowQuads * kSteps : 1][2];
};

// Score factors of a lane's rows 4 i + j in each of several scale blocks of a warp.
template <uint32_t kRowQuads, uint32_t kBlocks>
class BlockFactors {
  static constexpr bool kKept = kRowQuads * kBlocks < 4;

 public:
  BlockFactors() = default;
  explicit BlockFactors(const RowFactors& of_blocks) : shared_(of_blocks[0] + threadIdx.x % 4) {
#pragma unroll
    for (uint32_t i = 0; kKept && i < kRowQuads * kBlocks; ++i)
      kept_[i] = of_blocks[i / kRowQuads][i % kRowQuads * 4 + threadIdx.x % 4];
  }
  ScoreFactors get(uint32_t block, uint32_t four) const {
    return kKept ? kept_[block * kRowQuads + four] : shared_[block * kDecodeMaxRows + 4 * four];
  }

 private:
  const ScoreFactors* shared_;
  ScoreFactors kept_[kKept ? kRowQuads * kBlocks : 1];
};

// Score factors of a lane's rows 8 i + g. Rows that only fill the MMA repeat real ones.
template <uint32_t kRowTiles>
struct Float16Factors {
  ScoreFactors of[kRowTiles];

  Float16Factors() = default;
  Float16Factors(const ScoreFactors* shared, uint32_t rows) {
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles; ++i)
      of[i] = shared[(8 * i + threadIdx.x % kWarp / 4) % rows];
  }
};

// What a warp keeps of its queries while it walks the keys: operands and factors, over levels or
// over 16-bit keys.
template <class Traits, bool kLevels = Traits::kLevelsK, bool kTiles = Traits::kStage.k_tiles>
struct Queries {
  QueryColumns<Traits::kRows / 4, Traits::kKeySlice / 32, Traits::kKeyDim / 32> operands;
  LevelFactors<Traits::kRows / 4, Traits::kBlocksK> factors;

  Queries() = default;
  Queries(const unsigned char* shared, const RowFactors& of_slices, uint32_t slice, uint32_t)
      : operands(reinterpret_cast<const uint2*>(shared), slice),
        factors(of_slices, slice, Traits::kWarpsPerKey) {}
};
template <class Traits>
struct Queries<Traits, true, true> {
  static constexpr uint32_t kSlots = decode_key_steps(Traits::kKeyDim) * Traits::kBlocksK;
  QueryColumns<Traits::kRows / 4, kSlots, kSlots> operands;
  BlockFactors<Traits::kRows / 4, Traits::kBlocksK> factors;

  Queries() = default;
  Queries(const unsigned char* shared, const RowFactors& of_blocks, uint32_t slice, uint32_t)
      : operands(reinterpret_cast<const uint2*>(shared), slice), factors(of_blocks) {}
};
template <class Traits>
struct Queries<Traits, false, false> {
  static constexpr uint32_t kOfSlice = Traits::kKeySlice / 16 * row_tiles(Traits::kRows) * kWarp;
  const uint4* operands;
  Float16Factors<row_tiles(Traits::kRows)> factors;

  Queries() = default;
  Queries(const unsigned char* shared, const RowFactors& of_slices, uint32_t slice, uint32_t rows)
      : operands(reinterpret_cast<const uint4*>(shared) + slice * kOfSlice + threadIdx.x % kWarp),
        factors(of_slices[0], rows) {}
};

}  // namespace gyre::cuda
