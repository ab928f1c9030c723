#pragma once
// attention: how many rows a thread group takes and where they lie in its memory. For the kernels
// and their launch.
#include "abi/attention_cut.h"
#include "abi/kv_codec.h"

namespace gyre {
namespace metal {

GYRE_CONSTANT uint32_t kAttentionSimdgroups = 4;
GYRE_CONSTANT uint32_t kAttentionThreads = kAttentionSimdgroups * 32;
GYRE_CONSTANT uint32_t kBlockKeys = 32;  // that a simdgroup takes at a time, a lane a key
GYRE_CONSTANT uint32_t kMaxTileRows = 8;
GYRE_CONSTANT uint32_t kMaxTileFloats = 2048;  // of queries, then of sums
GYRE_CONSTANT uint32_t kRowNotesBytes = 32;    // RowNotes

// Rows of a KV head that a group takes: a lane has v_dim / 32 sums of each.
constexpr uint32_t attention_tile_rows(uint32_t k_dim, uint32_t v_dim) {
  const uint32_t dim = k_dim > v_dim ? k_dim : v_dim;
  const uint32_t rows = kMaxTileFloats / (dim != 0 ? dim : 1);
  return rows < 1 ? 1 : (rows < kMaxTileRows ? rows : kMaxTileRows);
}

// Scales of a value: native blocks are powers of two of at most 256 coordinates.
constexpr uint32_t value_blocks(uint32_t format, uint32_t v_dim) {
  if (abi::kv_is_mlx_native(format)) return abi::kv_mlx_native_norms(v_dim);
  if (!abi::kv_is_native(format)) return 0;
  uint32_t blocks = v_dim / abi::kKvScaleBlock;
  for (uint32_t remainder = v_dim % abi::kKvScaleBlock; remainder != 0; remainder &= remainder - 1)
    ++blocks;
  return blocks;
}

// Offsets in bytes.
struct AttentionLayout {
  uint32_t notes, weights, scales, states, total;  // the rows themselves come first
};
inline AttentionLayout attention_layout(uint32_t k_dim, uint32_t v_dim, uint32_t rows,
                                        uint32_t v_blocks) {
  const uint32_t dim = k_dim > v_dim ? k_dim : v_dim, keys = kAttentionSimdgroups * kBlockKeys;
  AttentionLayout at = {};
  at.notes = (rows * dim * 4 + 15) / 16 * 16;
  at.weights = at.notes + rows * kRowNotesBytes;
  at.scales = at.weights + keys * rows * 4;
  at.states = at.scales + keys * v_blocks * 4;
  at.total = (at.states + kAttentionSimdgroups * rows * 8 + 15) / 16 * 16;
  return at;
}

// Over pages each decoding sequence's keys are cut by its own length, a group to a split.
GYRE_CONSTANT uint64_t kSplitKeys = 512, kMaxSplits = 32;

// attention_many_rows: eight rows to a simdgroup.
GYRE_CONSTANT uint32_t kManyRowsTile = kAttentionSimdgroups * 8;
GYRE_CONSTANT uint32_t kMaxManyRowsDim = 256;
GYRE_CONSTANT uint32_t kStageFloats = 4096;  // keys, then values, of a stage
GYRE_CONSTANT uint32_t kMaxStageKeys = 32;

constexpr uint32_t many_rows_keys(uint32_t k_dim, uint32_t v_dim) {
  return (k_dim > v_dim ? k_dim : v_dim) <= 128 ? kMaxStageKeys : kMaxStageKeys / 2;
}
// Rows whose queries, or sums, the memory of a stage holds.
constexpr uint32_t many_rows_staged(uint32_t dim) { return dim <= 128 ? 32 : 16; }

// Offsets in bytes; the stage comes first.
struct ManyRowsLayout {
  uint32_t notes, scores, squares, flags, total;
};
inline ManyRowsLayout many_rows_layout(uint32_t k_dim, uint32_t v_dim) {
  ManyRowsLayout at = {};
  at.notes = kStageFloats * 4;
  at.scores = at.notes + kManyRowsTile * kRowNotesBytes;
  at.squares = at.scores + kManyRowsTile * many_rows_keys(k_dim, v_dim) * 4;
  at.flags = at.squares + kAttentionSimdgroups * 64 * 4;
  at.total = at.flags + kAttentionSimdgroups * 8;
  return at;
}

}  // namespace metal
}  // namespace gyre
