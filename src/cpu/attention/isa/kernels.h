#pragma once
// The inner loops of attention that want instructions Highway does not offer: int8 matrix products
// over levels, widening products of f16, matrix products of bf16. One file per instruction set
// fills in the table; what is missing is done in f32 by attention_stream-inl.h.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "abi/kv_codec.h"

namespace gyre::cpu {

constexpr uint32_t kAttentionBlock = 64;  // keys taken at a time: 8 tiles
constexpr uint32_t kAttentionRows = 64;   // queries that share a pass over the keys
constexpr float kBf16Lift = 0x1p16f;      // for the lower of the two bf16 that a query is made of

// Coordinates under one scale, in the order the operands have them.
struct LevelBlocks {
  uint32_t count = 0;
  uint32_t begin[abi::kKvMaxScales] = {};
  uint32_t size[abi::kKvMaxScales] = {};
};

// Memory the next step will read, fetched bit by bit: in one go it would hold up the work it hides
// behind.
struct Ahead {
  const uint8_t* at = nullptr;
  uint32_t bytes_per_unit = 0;  // of a key (scores), or of eight coordinates (values)
};

// How a row's queries lie, in 16 bits each.
enum class QueryLayout : uint8_t {
  bytes_by_eight,  // of each 8 coordinates the upper bytes, then the lower bytes
  bytes_apart,     // the upper bytes of all, then the lower bytes of all
  whole            // int16
};

// Keys of a block against all rows: scores[row * kAttentionBlock + key], in units of the query's
// own.
struct ScoreJob {
  const uint8_t* keys = nullptr;    // of the block's first slot
  uint64_t key_stride = 0;          // bytes from slot to slot
  const uint8_t* scales = nullptr;  // of the block's first tile
  uint64_t scales_stride = 0;       // bytes from tile to tile
  uint32_t format = 0;              // tq8: levels, one byte each
  uint32_t head_dim = 0;            // bytes, coordinates or levels of a row, padding included
  uint32_t key_count = 0;           // over levels a multiple of 8
  uint32_t rows = 0;
  const LevelBlocks* blocks = nullptr;
  // Levels: as the set's QueryLayout says. bf16: of each 4 coordinates the nearest bf16, then the
  // nearest to kBf16Lift times what is left.
  const int8_t* q = nullptr;
  // Levels: the sum of a row's queries over a block, [row * abi::kKvMaxScales + block].
  const int32_t* q_sums = nullptr;
  const float* q_plain = nullptr;  // f16: [rows][head_dim]
  float* scores = nullptr;
  Ahead ahead;
};

// acc = acc * keep + p v. p[row * kAttentionBlock + key] is 0 for keys that are not seen.
struct AccumulateJob {
  const uint8_t* values = nullptr;  // of the block's first tile or slot
  uint64_t value_stride = 0;        // bytes from tile to tile (levels) or slot to slot (f16, bf16)
  const uint8_t* scales = nullptr;
  uint64_t scales_stride = 0;
  uint32_t format = 0;
  uint32_t head_dim = 0;
  uint32_t begin = 0, end = 0;  // keys that may be read (f16, bf16)
  uint32_t tiles = 0;
  uint32_t rows = 0;
  const LevelBlocks* blocks = nullptr;
  const float* p = nullptr;
  const float* keep = nullptr;  // per row
  float* acc = nullptr;         // [rows][head_dim]
  Ahead ahead;
};

struct AttentionKernels {
  const char* name = "portable";
  void (*score_levels)(const ScoreJob&) = nullptr;
  void (*accumulate_levels)(const AccumulateJob&) = nullptr;
  void (*score_f16)(const ScoreJob&) = nullptr;
  void (*accumulate_f16)(const AccumulateJob&) = nullptr;
  void (*score_bf16)(const ScoreJob&) = nullptr;
  void (*accumulate_bf16)(const AccumulateJob&) = nullptr;
  QueryLayout query_layout = QueryLayout::bytes_by_eight;
};

template <size_t kRows>
struct RowCount {
  static constexpr size_t value = kRows;
};

// Calls run(RowCount<n>(), first row) for rows in fours, then twos, then one. Instantiated with a
// local lambda only, so it belongs to its file alone.
template <class Run>
void for_row_groups(size_t rows, const Run& run) {
  size_t row = 0;
  for (; row + 4 <= rows; row += 4) run(RowCount<4>(), row);
  for (; row + 2 <= rows; row += 2) run(RowCount<2>(), row);
  if (row < rows) run(RowCount<1>(), row);
}

// Every set this machine can run, the fastest first; the last does everything in f32.
const std::vector<AttentionKernels>& attention_kernel_sets();

// The set in use: the fastest, unless a test took another. Not while commands run.
const AttentionKernels& attention_kernels();
void use_attention_kernels(const AttentionKernels& set);  // one of attention_kernel_sets()

// A file per instruction set; compiled with its flags, so called only where it exists.
AttentionKernels i8mm_attention_kernels();
AttentionKernels dotprod_attention_kernels();
AttentionKernels vnni_attention_kernels();
AttentionKernels avx2_attention_kernels();
void add_f16_attention_kernels(AttentionKernels& kernels);
void add_bf16_attention_kernels(AttentionKernels& kernels);

}  // namespace gyre::cpu
