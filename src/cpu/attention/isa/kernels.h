#pragma once
// The inner loops of decode attention that want instructions Highway does not offer: int8 dot
// products and matrix products (MMA) over levels, widening f16 products, bf16 MMA. One file per
// instruction set fills in the table; what it leaves out, dense-inl.h does in f32.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "abi/kv_codec.h"
#include "cpu/attention/isa/prompt_kernels.h"

namespace gyre::cpu {

constexpr uint32_t kBlockKeys = 64;  // keys that a kernel takes at a time: 8 tiles
constexpr uint32_t kTileRows = 64;   // rows of queries that a kernel takes at a time
constexpr uint32_t kMaxRows = 256;   // rows of a work tile, which share a pass over the keys
constexpr uint32_t kPaddedHeadDim = abi::kKvMaxHeadDim + 256;  // scale blocks padded to 64 each
// A block's values in 32 bits, and a note about them.
constexpr uint64_t kValueScratchBytes = uint64_t{4} * abi::kKvMaxHeadDim * kBlockKeys + 64;
constexpr uint32_t kLogits = kPromptRows * kPromptStride;  // that a thread has room for
static_assert(kLogits >= kTileRows * kBlockKeys);
// Scratch of a thread: queries, sums and unpacked keys in f32, values, scores, and both operands in
// 8 bits.
constexpr uint64_t kAttentionScratchBytes =
    uint64_t{4} * abi::kKvMaxHeadDim * (2 * kMaxRows + kBlockKeys) + kValueScratchBytes +
    uint64_t{4} * kLogits + uint64_t{kPaddedHeadDim} * (2 * kMaxRows + kBlockKeys);
constexpr float kBf16Lift = 0x1p16f;  // what the lo part of a query's hi/lo split is multiplied by

// Coordinates under one scale, in the order the operands have them.
struct ScaleBlocks {
  uint32_t count = 0;
  uint32_t begin[abi::kKvMaxScales] = {};
  uint32_t size[abi::kKvMaxScales] = {};
  uint32_t used[abi::kKvMaxScales] = {};  // without padding
};

// Memory the next phase reads, fetched step by step: one long burst would stall the loads it hides
// behind.
struct Prefetch {
  const uint8_t* at = nullptr;
  uint32_t bytes_per_step = 0;  // a step is a key (scores), or eight coordinates (values)
};

// How a row of queries lies, as integers of 16 bits. hi and lo are their bytes: q = 256 hi + lo.
enum class QueryLayout : uint8_t {
  hi_lo_by_eight,  // hi of eight coordinates, then lo of these eight
  hi_then_lo,      // hi of all, then lo of all
  int16
};

// Scores of a block's keys: scores[row * kBlockKeys + key], in units of the row's query scale.
struct ScoreJob {
  const uint8_t* keys = nullptr;    // the block's first slot
  uint64_t key_stride = 0;          // bytes from slot to slot
  const uint8_t* scales = nullptr;  // the block's first tile
  uint64_t scales_stride = 0;       // bytes from tile to tile
  uint32_t format = 0;              // tq8: levels, one byte each
  uint32_t head_dim = 0;            // coordinates of a row, padding included; see byte_step
  uint32_t key_dim = 0;             // those that rows of levels have, if that is not head_dim
  uint32_t key_count = 0;           // a multiple of 8 over levels
  uint32_t rows = 0;
  uint32_t tile_rows = 0;  // of the work tile, whose queries were arranged together
  const ScaleBlocks* blocks = nullptr;
  // Levels: integers in the set's QueryLayout. bf16, if queries are split: of each 4 coordinates
  // hi, the nearest bf16, then lo, the nearest to kBf16Lift times the rest.
  const int8_t* q = nullptr;
  const int32_t* q_sums = nullptr;  // levels: [row * abi::kKvMaxScales + scale block]
  const float* q_f32 = nullptr;     // [rows][head_dim]; a prompt's: what split_queries made
  float* scores = nullptr;
  void* scratch = nullptr;  // as many bytes as kBlockKeys rows of kKvMaxHeadDim f32
  bool fresh = true;        // the block's first rows: `scratch` holds nothing of it yet
  Prefetch prefetch;
};

// acc = acc * rescale + p v. p[row * kBlockKeys + key] is 0 for keys that the row does not see.
struct AccumulateJob {
  const uint8_t* values = nullptr;  // the block's first tile or slot
  uint64_t value_stride = 0;        // bytes from tile to tile (levels) or slot to slot (f16, bf16)
  const uint8_t* scales = nullptr;
  uint64_t scales_stride = 0;
  uint32_t format = 0;
  uint32_t head_dim = 0;
  uint32_t begin = 0, end = 0;  // keys that may be read (f16, bf16)
  // Where the first key lies in a whole block, a multiple of 8: a window may begin within, and sums
  // must not depend on that.
  uint32_t offset = 0;
  uint32_t tiles = 0;
  uint32_t rows = 0;
  const ScaleBlocks* blocks = nullptr;
  const float* p = nullptr;
  const float* rescale = nullptr;  // per row
  float* acc = nullptr;            // [rows][head_dim]
  void* scratch = nullptr;         // kValueScratchBytes
  bool fresh = true;
  Prefetch prefetch;
};

// A block of a latent in a native format, of which pack_latent makes both operands.
struct LatentBlock {
  const uint8_t* keys = nullptr;  // the block's first slot
  uint64_t key_stride = 0;        // bytes from slot to slot
  uint32_t format = 0;
  uint32_t head_dim = 0;  // a multiple of 128
  uint32_t key_count = 0;
  // Biased levels as [coordinate / 4][key][4], then levels in the order of the second product: 64
  // keys each.
  uint8_t* packed = nullptr;
};
constexpr uint32_t kPackedLatentDim = 128;  // what coordinates of a packed latent are multiples of

struct AttentionKernels {
  const char* name = "portable";
  // Around the blocks of a work tile, if the set has something to set up.
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
  // Rearranges queries over levels after they were rounded, rows of row_levels, if the set wants
  // it.
  void (*arrange_queries)(int8_t* q, uint32_t rows, uint32_t row_levels) = nullptr;
  void (*score_levels)(const ScoreJob&) = nullptr;
  void (*accumulate_levels)(const AccumulateJob&) = nullptr;
  void (*score_f16)(const ScoreJob&) = nullptr;
  void (*accumulate_f16)(const AccumulateJob&) = nullptr;
  void (*score_bf16)(const ScoreJob&) = nullptr;
  void (*accumulate_bf16)(const AccumulateJob&) = nullptr;
  // Prompts over f16 and bf16. The first makes operands of queries, in their place; it returns how
  // many floats a row has then.
  uint32_t (*split_queries)(float* q, uint32_t rows, uint32_t head_dim, uint32_t format) = nullptr;
  void (*score_prompt)(const ScoreJob&) = nullptr;
  void (*accumulate_prompt)(const AccumulateJob&) = nullptr;
  const PromptKernels* prompt = nullptr;  // if both K and V are f16 or bf16: more keys at a time
  // Latent attention over levels: score_latent takes the packed block in ScoreJob::scratch,
  // accumulate_latent its second half in AccumulateJob::values.
  void (*pack_latent)(const LatentBlock&) = nullptr;
  void (*score_latent)(const ScoreJob&) = nullptr;
  void (*accumulate_latent)(const AccumulateJob&) = nullptr;
  bool split_bf16_queries = false;  // of decoding: see ScoreJob::q; else score_bf16 reads q_f32
  // What f16 and bf16 are multiplied in; of several kernels the one with the largest errors counts.
  const char* f16_arithmetic = "f32";
  const char* bf16_arithmetic = "f32";
  QueryLayout query_layout = QueryLayout::hi_lo_by_eight;
  uint32_t prompt_rows = kTileRows;  // rows of a prompt that should share a pass over the keys
  uint32_t byte_step = 64;           // scale blocks of tq8's bytes are multiples of this
  uint32_t dot_rows = 0;             // but of 16 for work tiles of at most so many rows
  uint32_t nibble_step = 64;         // the same of tq4's rows
  bool odd_keys = false;  // score_levels pads rows that have other scale blocks, of 16 bytes on
};

template <size_t kRows>
struct RowCount {
  static constexpr size_t value = kRows;
};

// Calls run(RowCount<n>(), first row) for rows in fours, then twos, then one. Instantiated with a
// local lambda only, so each file has its own copy, compiled with its own instructions.
template <class Run>
void for_row_groups(size_t rows, const Run& run) {
  size_t row = 0;
  for (; row + 4 <= rows; row += 4) run(RowCount<4>(), row);
  for (; row + 2 <= rows; row += 2) run(RowCount<2>(), row);
  if (row < rows) run(RowCount<1>(), row);
}

// Every set this machine can run, the fastest first; the last does everything in f32.
const std::vector<AttentionKernels>& attention_kernel_sets();
// As above, with may_use_tiles() in place of the system's answer about AMX's tiles.
std::vector<AttentionKernels> find_attention_kernel_sets(bool (*may_use_tiles)());

// The set in use: the fastest, unless a test chose another. Not to be changed while commands run.
const AttentionKernels& attention_kernels();
void use_attention_kernels(const AttentionKernels& set);  // one of attention_kernel_sets()

// A file per instruction set, compiled with its flags: called only where the machine has it.
AttentionKernels i8mm_attention_kernels();
AttentionKernels dotprod_attention_kernels();
AttentionKernels amx_attention_kernels();
AttentionKernels vbmi_attention_kernels();
AttentionKernels vnni_attention_kernels();
AttentionKernels avx2_attention_kernels();
void add_avx512_attention_kernels(AttentionKernels& kernels);
void add_latent_kernels(AttentionKernels& kernels);  // to a set whose queries are hi_then_lo
void add_f16_attention_kernels(AttentionKernels& kernels);
void add_bf16_attention_kernels(AttentionKernels& kernels);
void add_bf16_prompt_kernels(AttentionKernels& kernels);
void add_amx_prompt_kernels(AttentionKernels& kernels);

}  // namespace gyre::cpu
