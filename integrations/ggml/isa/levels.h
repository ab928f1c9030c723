#pragma once
// Scores of keys in ggml's blocks for few rows of queries. A query becomes integers of 16 bits, two
// planes of bytes, hi and lo, with a scale for each block of 32 coordinates: its dot product with a
// block's codes is exact, and the scale of the block multiplies that one number.

#include <cstdint>

#include "problem.h"

namespace gyre::ggml {

// Scores of up to kBlockKeys cells for a group of rows.
struct LevelScores {
  const uint8_t* keys = nullptr;  // the first cell
  uint64_t stride = 0;            // bytes from cell to cell
  const uint8_t* next = nullptr;  // cells to fetch meanwhile; null: nothing follows
  RowType type = RowType::q8_0;
  uint32_t count = 0, dim = 0;  // cells, coordinates
  const float* q = nullptr;     // what pack_queries made of the group
  uint32_t rows = 0;
  float* logits = nullptr;  // [row][kBlockKeys], written up to a multiple of 4 cells
};

struct LevelKernels {
  const char* name;
  uint32_t rows;  // of a group
  // q: [rows][stride]. False if a number is too large for this, or not finite: use f32.
  bool (*pack_queries)(const float* q, uint32_t rows, uint64_t stride, uint32_t dim, RowType keys,
                       float* to);
  // False if a block's scale is not finite.
  bool (*score)(const LevelScores& job);
};

// Floats that packed queries of a row take.
constexpr uint64_t level_query_floats(uint64_t dim) { return dim / 32 * 24; }

// Rows of an item below which scores are computed from codes.
constexpr uint32_t kLevelRows = 16;

constexpr bool has_levels(RowType type) { return row_format(type).block == 32; }

LevelKernels dotprod_level_kernels();  // called only where the machine has Armv8.2's dot product

}  // namespace gyre::ggml
