#pragma once
// Decode attention over pages: the shared-memory layout of a block. Host and kernel compute the
// same.
#include "cuda/kernels/attention/decode/decode_layout.cuh"

namespace gyre::cuda {

constexpr uint32_t kMaxItemSlots = 12;  // work items that a block works on before its warps meet
constexpr uint32_t kTurns = 64;         // no fewer than splits of one work item can be in flight
constexpr uint32_t kQueuedSplits = 8;   // of a warp: more than have stages in flight

// Floats of the fold of a set of rows, as the MMA over V spreads them over a warp: four rows of
// levels or eight rows of 16-bit values, whose lanes hold four floats of every vector, and the
// rows' references and sums.
constexpr uint32_t fold_sets(uint32_t v, uint32_t rows) {
  return abi::kv_is_native(v) ? rows / 4 : row_tiles(rows);
}
constexpr uint32_t fold_vectors(uint32_t v, uint32_t slice) {
  return abi::kv_is_native(v) ? (slice + 31) / 32 : slice / 16;
}
constexpr uint32_t fold_set_bytes(uint32_t v, uint32_t slice) {
  return (fold_vectors(v, slice) + 1) * 512;
}
// All sets of all warps that share a key.
constexpr uint32_t fold_bytes(uint32_t v, const HeadDims& dims, uint32_t rows) {
  return decode_warps_per_key(dims) * fold_sets(v, rows) *
         fold_set_bytes(v, decode_slice_dim(dims.v));
}

// What a work item needs while it is worked on: queries as operands, the factors of their scores,
// masks, states of finished rows, barriers that order the folds of each set of rows, and the folds
// of a group and of the work item.
struct ItemSlot {
  uint32_t factors, masks, states, turns, group, item, bytes;
};
constexpr uint32_t kFactorBytes = 12 * 4 * kDecodeRows, kMaskBytes = 16, kStateBytes = 8;
constexpr uint32_t kBarrierBytes = 8;
constexpr ItemSlot item_slot(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows) {
  ItemSlot a = {};
  a.factors = decode_query_bytes(k, dims.k, rows);
  a.masks = a.factors + kFactorBytes;
  a.states = a.masks + rows * kMaskBytes;
  const uint32_t warps = decode_warps_per_key(dims);
  a.turns = a.states + warps * rows * kStateBytes;
  a.group = round_up(a.turns + warps * fold_sets(v, rows) * kTurns * kBarrierBytes, 128);
  a.item = a.group + fold_bytes(v, dims, rows);
  a.bytes = a.item + fold_bytes(v, dims, rows);
  return a;
}

// In this order: what all warps share, exchange buffers, the buffers of each warp (a query, scores
// to transpose, a ring of stages), and as many slots as there is room for.
struct PagedLayout {
  bool fits;
  ItemSlot slot;
  uint32_t exchange_bytes;               // of one warp, twice
  uint32_t transpose, ring, warp_bytes;  // of one warp
  uint32_t stages, stage;
  uint32_t max_warps, warps_per_key;

  constexpr uint32_t warps_at(uint32_t warps) const;
  constexpr uint32_t slots_at(uint32_t warps) const { return warps_at(warps) + warps * warp_bytes; }
  constexpr uint32_t slots(uint32_t warps, uint32_t bytes) const {
    const uint32_t at = slots_at(warps), fit = bytes > at ? (bytes - at) / slot.bytes : 0;
    return fit < kMaxItemSlots ? fit : kMaxItemSlots;
  }
};

constexpr uint32_t kPagedStateBytes = 6 << 10;
constexpr uint32_t PagedLayout::warps_at(uint32_t warps) const {
  return round_up(kPagedStateBytes + 2 * warps * exchange_bytes, 128);
}

constexpr uint32_t kFewPagedWarps = 8;
// Warps of a block. A warp computes longer on a stage of few bytes than these take to come, so more
// of them load, where 12 warps have the registers: with other formats and dims they spill.
constexpr uint32_t paged_warps(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows) {
  const bool formats = v == abi::kTq4 && (k == abi::kTq4 || k == abi::kTq8);
  const bool small = dims.k == dims.v && (dims.k == 64 || dims.k == 128);
  return formats && small && rows <= 4 ? 12 : kFewPagedWarps;
}

constexpr PagedLayout paged_layout(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows) {
  PagedLayout a = {};
  const DecodeStage stage = decode_stage(k, v, dims, rows, kDecodePages);
  const DecodeSharedLayout shared = decode_shared_layout(k, v, dims, rows, kDecodePages);
  a.fits = stage.fits;
  a.slot = item_slot(k, v, dims, rows);
  a.stage = stage.bytes;
  a.warps_per_key = decode_warps_per_key(dims);
  a.exchange_bytes = shared.exchange_bytes;
  a.transpose = round_up(dims.k, 32) * 4;  // behind the staging buffer of a query
  a.ring = round_up(a.transpose + shared.transpose_bytes, 128);
  a.max_warps = paged_warps(k, v, dims, rows);
  // Bytes of a warp in flight: more of them make the memory slower.
  constexpr uint32_t kInFlight = 9 << 10, kEnoughSlots = 2;
  a.stages = 1 + (kInFlight + a.stage / 2) / a.stage;
  a.stages = a.stages > kDecodeMaxStages ? kDecodeMaxStages : a.stages;
  const auto fits = [&a](uint32_t warps) {
    a.warp_bytes = a.ring + a.stages * a.stage;
    return a.slots(warps, kDecodeMaxBytes) >= kEnoughSlots;
  };
  while (a.stages > kDecodeFewestStages && !fits(a.max_warps)) --a.stages;
  if (a.stages < kDecodeFewestStages) a.stages = kDecodeFewestStages;
  while (!fits(a.max_warps) && a.max_warps > a.warps_per_key) a.max_warps -= a.warps_per_key;
  return a;
}

// What a GPU with so much shared memory gives to a block; no warps: not enough.
struct PagedLaunch {
  uint32_t warps, bytes;
};
constexpr PagedLaunch paged_launch(const PagedLayout& layout, uint32_t max_warps,
                                   uint32_t max_bytes) {
  for (uint32_t warps = max_warps; warps != 0; warps -= layout.warps_per_key) {
    const uint32_t slots = layout.slots(warps, max_bytes);
    if (slots != 0) return {warps, layout.slots_at(warps) + slots * layout.slot.bytes};
  }
  return {};
}

// One block for each multiprocessor: the lengths, and so the work, are known on the device only.
constexpr uint32_t paged_blocks(uint32_t multiprocessors) {
  return multiprocessors == 0 ? 1 : multiprocessors;
}
// Scratch of a call over pages: for each block a counter, at a multiple of 16 bytes the folds of
// the groups of one work item.
constexpr uint64_t paged_area_bytes(uint32_t v, const HeadDims& dims, uint32_t rows) {
  return kDecodeGroups * fold_bytes(v, dims, rows);
}
constexpr uint64_t paged_scratch_floats(uint32_t v, const HeadDims& dims, uint32_t rows,
                                        uint32_t blocks) {
  return (paged_counter_bytes(blocks) + blocks * paged_area_bytes(v, dims, rows)) / 4;
}

}  // namespace gyre::cuda
