#pragma once
// What kernels over levels share: queries as bytes, and the scales of a block of cells. All of it
// anonymous, so that each file has its own copy, compiled with its own instructions.

#include <cstddef>
#include <cstring>

#include "isa/levels.h"
#include "plan.h"

namespace gyre::ggml {
namespace {

constexpr uint32_t kBlock = 32;                    // values of a block
constexpr uint32_t kMaxBlocks = kMaxDim / kBlock;  // of a row
constexpr float kMaxLevel = 127 * 256 + 127;       // both planes are signed bytes
constexpr float kSmallest = 0x1p-60f, kLargest = 0x1p58f;

// 32 coordinates of kRows queries. Column r is the hi of row r, column kRows + r its lo.
template <size_t kRows>
struct alignas(64) QueryBlock {
  static constexpr size_t kColumns = 2 * kRows;
  int8_t codes[kBlock / 4][kColumns][4];
  float factor[kColumns];   // what a column's integer stands for
  int32_t start[kColumns];  // - bias * sum of a column's integers
  float sum[kColumns];      // of the coordinates, in hi's columns: the minimum of a block adds that
};

template <size_t kRows>
inline const QueryBlock<kRows>* query_blocks(const float* packed) {
  return reinterpret_cast<const QueryBlock<kRows>*>(packed);
}

// One row's 32 coordinates; false if one is too large or not finite.
template <size_t kRows>
inline bool pack_query_block(const float* x, size_t row, int32_t bias, QueryBlock<kRows>& to) {
  float largest = 0, sum = 0;
  bool fits = true;
  for (size_t i = 0; i < kBlock; ++i) {
    const float size = __builtin_fabsf(x[i]);
    fits = fits && size < kLargest;
    largest = size > largest ? size : largest;
    sum += x[i];
  }
  // An error in a logit is absolute: numbers that small do not count.
  const float inverse = largest < kSmallest ? 0 : kMaxLevel / largest;
  int32_t sums[2] = {};
  for (size_t i = 0; i < kBlock; ++i) {
    // The nearest integer is in the last bits of the sum.
    const float shifted = x[i] * inverse + 12582912.0f;
    int32_t level = 0;
    std::memcpy(&level, &shifted, 4);
    level -= 0x4B400000;
    const auto lo = static_cast<int8_t>(level & 0xFF);
    const auto hi = static_cast<int8_t>((level - lo) >> 8);
    to.codes[i / 4][row][i % 4] = hi;
    to.codes[i / 4][kRows + row][i % 4] = lo;
    sums[0] += hi;
    sums[1] += lo;
  }
  const float step = largest < kSmallest ? 0 : largest / kMaxLevel;
  to.factor[row] = 256 * step;
  to.factor[kRows + row] = step;
  to.start[row] = -bias * sums[0];
  to.start[kRows + row] = -bias * sums[1];
  to.sum[row] = sum;
  return fits;
}

// bias: what codes are larger than the levels they stand for.
template <size_t kRows>
inline bool pack_query_group(const float* q, uint32_t rows, uint64_t stride, uint32_t dim,
                             int32_t bias, float* to) {
  static_assert(sizeof(QueryBlock<kRows>) <= kRows * level_query_floats(kBlock) * sizeof(float));
  auto* const blocks = reinterpret_cast<QueryBlock<kRows>*>(to);
  std::memset(blocks, 0, dim / kBlock * sizeof(*blocks));
  bool fits = true;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t block = 0; block < dim / kBlock; ++block)
      fits &= pack_query_block(q + row * stride + block * kBlock, row, bias, blocks[block]);
  }
  return fits;
}

// Scales and minima of a block of cells, [block of the row][cell]; 0 for cells that are not there.
template <RowType kType>
struct CellFactors {
  static constexpr bool kHasMinimum = kType == RowType::q4_1 || kType == RowType::q5_1;
  alignas(64) float scale[kMaxBlocks][kBlockKeys];
  alignas(64) float minimum[kHasMinimum ? kMaxBlocks : 1][kBlockKeys];

  // False if one is not finite. widen(16-bit floats, floats) converts kBlockKeys of them.
  template <class Widen>
  bool load(const LevelScores& job, const Widen& widen) {
    constexpr size_t kBytes = row_format(kType).block_bytes;
    const size_t blocks = job.dim / kBlock;
    uint16_t bits[kHasMinimum ? 2 : 1][kMaxBlocks][kBlockKeys];
    for (auto& of_rows : bits) std::memset(of_rows, 0, blocks * sizeof(of_rows[0]));
    uint16_t largest = 0;
    for (size_t key = 0; key < job.count; ++key) {
      const uint8_t* at = job.keys + key * job.stride;
      for (size_t block = 0; block < blocks; ++block, at += kBytes) {
        for (size_t i = 0; i < (kHasMinimum ? 2 : 1); ++i) {
          uint16_t half = 0;
          std::memcpy(&half, at + 2 * i, 2);
          bits[i][block][key] = half;
          const auto size = static_cast<uint16_t>(half & 0x7FFF);
          largest = size > largest ? size : largest;
        }
      }
    }
    for (size_t block = 0; block < blocks; ++block) {
      widen(bits[0][block], scale[block]);
      if constexpr (kHasMinimum) widen(bits[1][block], minimum[block]);
    }
    return largest < 0x7C00;
  }
};

// Calls run(type as a constant) for a type of blocks.
template <RowType kType>
struct TypeConstant {
  static constexpr RowType value = kType;
};
template <class Run>
inline bool with_level_type(RowType type, const Run& run) {
  switch (type) {
    case RowType::q8_0:
      return run(TypeConstant<RowType::q8_0>());
    case RowType::q4_0:
      return run(TypeConstant<RowType::q4_0>());
    case RowType::q4_1:
      return run(TypeConstant<RowType::q4_1>());
    case RowType::q5_0:
      return run(TypeConstant<RowType::q5_0>());
    case RowType::q5_1:
      return run(TypeConstant<RowType::q5_1>());
    default:
      return false;
  }
}

// Where a block's codes begin; the fifth bits are in front of them.
template <RowType kType>
constexpr size_t kCodes = row_format(kType).block_bytes - (kType == RowType::q8_0 ? 32 : 16);
template <RowType kType>
constexpr bool kHasFifthBit = kType == RowType::q5_0 || kType == RowType::q5_1;

constexpr int32_t level_bias(RowType type) {
  return type == RowType::q4_0 ? 8 : type == RowType::q5_0 ? 16 : 0;
}

inline void fetch_row(const LevelScores& job, size_t key) {
  if (job.next == nullptr || key >= job.count) return;
  const uint8_t* const row = job.next + key * job.stride;
  const size_t bytes = row_bytes(job.type, job.dim);
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  __builtin_prefetch(row + bytes - 1);
}

}  // namespace
}  // namespace gyre::ggml
