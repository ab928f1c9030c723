#pragma once
// Attention of draft tokens over levels: how a block uses its threads and its shared memory.
// Constants of a variant, for the host and the kernel alike.
//
// Producer warps copy stages of kDraftKeys keys as they are stored into one ring and unpack them
// into int8 operands in the slots of another. A consumer warpgroup multiplies: it has 32 rows, the
// upper and lower bytes of a row are two of the 64 rows of a wgmma.
#include "abi/attention_schedule.h"
#include "cuda/kernels/attention/many_rows/layout.cuh"

namespace gyre::cuda {

constexpr uint32_t kDraftKeys = 64;  // of a stage
constexpr uint32_t kDraftTiles = kDraftKeys / abi::kKvTile;
constexpr uint32_t kDraftRows = 32;  // of a consumer warpgroup
constexpr uint32_t kDraftStateBytes = 5120;
constexpr uint32_t kDraftScaleBytes = 2 * kDraftKeys * 4;  // of a slot: floats of K, then of V
constexpr uint32_t kDraftMaxSlots = 4, kDraftMaxStored = 6;

// Consumer warpgroups of a variant; 0: it is not attention_drafts.
constexpr uint32_t draft_groups(uint32_t gpu) {
  if (gpu == kManyRowsDrafts) return 1;
  return gpu == kManyRowsDrafts2 ? 2 : 0;
}

struct DraftsLayout {
  uint32_t groups;                        // consumer warpgroups; 0: the variant does not fit
  uint32_t blocks;                        // of a multiprocessor, side by side
  uint32_t slots;                         // operands of a stage
  uint32_t stored;                        // stages as they are stored
  uint32_t k_bytes, v_bytes, slot_bytes;  // operands of a slot
  uint32_t k_tile_bytes, v_tile_bytes, v_at, k_scales_at, v_scales_at, stored_bytes;  // of a stage
  uint32_t warp_bytes;  // of a consumer warp: its queries, then its folded rows
  uint32_t warps_at, slots_at, scales_at, stored_at, total;  // offsets; scales: of slots

  constexpr uint32_t threads() const { return groups * kGroupThreads + kProducers; }
  constexpr uint32_t rows() const { return groups * kDraftRows; }
};

constexpr bool drafts_take(uint32_t format, uint32_t head_dim, bool values) {
  return abi::kv_is_native(format) && many_rows_takes(format, head_dim, values);
}

constexpr DraftsLayout drafts_layout(uint32_t k_format, uint32_t v_format, uint32_t k_dim,
                                     uint32_t v_dim, uint32_t groups) {
  DraftsLayout a = {};
  if (!drafts_take(k_format, k_dim, false) || !drafts_take(v_format, v_dim, true)) return a;
  // Sums and queries of more than 128 coordinates take the registers of a whole multiprocessor.
  const bool wide = k_dim > 128 || v_dim > 128;
  if (groups == 0 || groups > (wide ? 1u : 2u)) return a;
  a.blocks = wide || groups == 2 ? 1 : 2;
  const uint32_t budget = a.blocks == 2 ? kHalfBytes : kManyRowsBytes[kManyRowsHopper];
  a.k_bytes = kDraftKeys * k_dim;
  a.v_bytes = kDraftKeys * v_dim;
  a.slot_bytes = a.k_bytes + a.v_bytes;
  a.k_tile_bytes = k_dim * abi::kv_bits(k_format);
  a.v_tile_bytes = v_dim * abi::kv_bits(v_format);
  a.v_at = kDraftTiles * a.k_tile_bytes;
  a.k_scales_at = a.v_at + kDraftTiles * a.v_tile_bytes;
  a.v_scales_at = a.k_scales_at + kDraftTiles * 16;
  a.stored_bytes = a.v_scales_at + kDraftTiles * 16;
  const uint32_t queries = 16 * k_dim, rows = 8 * v_dim * 4;
  a.warp_bytes = queries > rows ? queries : rows;
  a.warps_at = kDraftStateBytes;
  a.slots_at = round_up(a.warps_at + groups * 4 * a.warp_bytes, 1024);
  // Copies in flight come first: memory must be busy while a stage is unpacked.
  for (a.slots = 3; a.slots >= 2; --a.slots) {
    a.scales_at = a.slots_at + a.slots * a.slot_bytes;
    a.stored_at = a.scales_at + a.slots * kDraftScaleBytes;
    const uint32_t left = a.stored_at < budget ? (budget - a.stored_at) / a.stored_bytes : 0;
    a.stored = left < kDraftMaxStored ? left : kDraftMaxStored;
    a.total = a.stored_at + a.stored * a.stored_bytes;
    if (a.stored >= 3) {
      a.groups = groups;
      return a;
    }
  }
  return {};
}

// Keys of a group of splits: the sums of a group begin anew. Short enough that blocks get equal
// shares, long enough that what a group costs beside its keys counts little.
constexpr abi::AttentionCut kDraftCut = {1024, 32};

constexpr uint32_t drafts_blocks(const DraftsLayout& layout, uint32_t multiprocessors) {
  return (multiprocessors == 0 ? 1 : multiprocessors) * layout.blocks;
}
// Scratch of a call: a counter for each consumer warp of each block, then for each block the states
// of the groups of one work item, values and {reference, sum} of each row.
constexpr uint64_t draft_state_floats(uint32_t v_dim, uint32_t rows) {
  return uint64_t{rows} * (v_dim + 2);
}
constexpr uint64_t draft_area_floats(uint32_t v_dim, uint32_t rows) {
  return kDraftCut.max_splits * draft_state_floats(v_dim, rows);
}
constexpr uint64_t drafts_scratch_floats(const DraftsLayout& layout, uint32_t v_dim,
                                         uint32_t blocks) {
  return paged_counter_bytes(blocks * layout.groups * 4) / 4 +
         blocks * draft_area_floats(v_dim, layout.rows());
}

}  // namespace gyre::cuda
