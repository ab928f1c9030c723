#pragma once
// Attention of many rows: how a block uses its threads and its shared memory. Constants of a
// variant, for the host and the kernel alike.
//
// Consumer warpgroups of 64 rows each multiply; four producer warps bring K and V. What they hand
// over are items, K and V of a stage in turn, each in a slot of a ring: MMA operands of 16 bits in
// rows of 128 bytes, swizzled. The multipliers and numbers of a stage's keys have a ring of their
// own. Levels come through a second ring as they are stored. Those that a command ahead has
// unpacked come as operands, and the second ring has their keys' multipliers.
#include "abi/attention_schedule.h"
#include "cuda/kernels/attention/common/formats.cuh"

namespace gyre::cuda {

// Blocks by what they may use of a GPU. Of a Hopper, which has wgmma: all, for 128 rows, or for 64
// rows half, so that two blocks run side by side where head dims allow. Of others 163 KB or 99 KB.
// Drafts: attention_drafts with one or two consumer warpgroups, on a Hopper. Unpack: the command
// that unpacks levels for Unpacked, which uses all of a Hopper.
constexpr uint32_t kManyRowsHopper = 0, kManyRowsHalf = 1, kManyRowsMedium = 2, kManyRowsSmall = 3,
                   kManyRowsDrafts = 4, kManyRowsDrafts2 = 5, kManyRowsUnpack = 6,
                   kManyRowsUnpacked = 7, kManyRowsNone = 8;
constexpr uint32_t kManyRowsBytes[] = {227 << 10, 227 << 10, 163 << 10, 99 << 10};
constexpr uint32_t kHalfBytes = 113 << 10;

constexpr uint32_t kGroupRows = 64;      // of a consumer warpgroup
constexpr uint32_t kGroupThreads = 128;  // of a warpgroup
constexpr uint32_t kProducers = 128;     // threads
constexpr uint32_t kMaxSlots = 6;
// Stages in the ring of scales and numbers. Producers are at most three stages ahead of the oldest
// scores without weights: a slot of K is free as soon as its scores are there.
constexpr uint32_t kKeyInfoStages = 4;
constexpr uint32_t kWarpMultipliers =
    128;  // bytes of those of a producer warp's 32 keys, K's and V's
constexpr uint32_t kManyRowsStateBytes = 4096;  // what is known of the tile, and its rows' factors

struct ManyRowsLayout {
  uint32_t groups;            // consumer warpgroups
  uint32_t blocks;            // of a multiprocessor, side by side
  uint32_t keys;              // of a stage
  uint32_t slots;             // operands in shared memory; 0: the variant does not fit
  uint32_t ahead;             // copies in flight: of stored bytes, or straight into slots
  uint32_t k_panel, v_panel;  // bytes of an operand's part of 128 bytes a row
  uint32_t q_panel;
  uint32_t slot_bytes;
  uint32_t scales, numbers, v_scales, maxima, not_one,
      key_info_bytes;                                  // inside what is known of a stage's keys
  uint32_t k_tile_bytes, v_tile_bytes, stored_scales;  // of 8 keys; of a stored item: K's, V's
  uint32_t stored_bytes;
  uint32_t q, operand_scales, key_info, slot, stored, total;  // offsets

  constexpr uint32_t threads() const { return groups * kGroupThreads + kProducers; }
  constexpr uint32_t rows() const { return groups * kGroupRows; }
};

constexpr uint32_t panels_of(uint32_t elements) { return (elements + 63) / 64; }

// Both head dims are multiples of 16 up to 256; one scale to a row of levels.
constexpr bool many_rows_takes(uint32_t format, uint32_t head_dim, bool values) {
  if (head_dim == 0 || head_dim > 256 || head_dim % 16 != 0) return false;
  if (is_float16_format(format)) return true;
  if (!abi::kv_is_native(format)) return false;
  const uint32_t low = abi::kv_low_bits(format), high = abi::kv_high_bits(format);
  const uint32_t group = abi::kv_group(high != 0 && high < low ? high : low);
  return (head_dim & (head_dim - 1)) == 0 && head_dim >= 64 && (values || head_dim % group == 0);
}

constexpr ManyRowsLayout many_rows_layout(uint32_t k_format, uint32_t v_format, uint32_t k_dim,
                                          uint32_t v_dim, uint32_t gpu) {
  ManyRowsLayout a = {};
  const bool unpacked = gpu == kManyRowsUnpacked;
  if (unpacked && !(abi::kv_is_native(k_format) && abi::kv_is_native(v_format))) return a;
  if (unpacked) gpu = kManyRowsHopper;
  if (gpu > kManyRowsSmall || !many_rows_takes(k_format, k_dim, false) ||
      !many_rows_takes(v_format, v_dim, true))
    return a;
  const bool k_levels = abi::kv_is_native(k_format), v_levels = abi::kv_is_native(v_format);
  const bool wide = k_dim > 128 || v_dim > 128;
  a.blocks = gpu == kManyRowsHalf && !wide ? 2 : 1;
  const uint32_t budget = a.blocks == 2 ? kHalfBytes : kManyRowsBytes[gpu];
  // A row's sums and scores are in registers, of which a Hopper's producers leave the consumers
  // more.
  a.groups = gpu == kManyRowsHopper ? 2 : 1;
  a.keys = gpu == kManyRowsHopper && !wide ? 128 : 64;
  if (gpu == kManyRowsSmall && wide) a.keys = 32;
  if (v_levels && a.keys < 64) a.keys = 64;  // an operand of V has 64 keys a row
  a.q_panel = kGroupRows * 128;
  a.k_panel = a.keys * 128;
  // Levels that the producers unpack have keys inside the rows of V's operand, others coordinates.
  const bool keys_inside = v_levels && !unpacked;
  a.v_panel = keys_inside ? v_dim * 128 : a.keys * 128;
  const uint32_t k_bytes = panels_of(k_dim) * a.k_panel;
  const uint32_t v_bytes = (keys_inside ? panels_of(a.keys) : panels_of(v_dim)) * a.v_panel;
  a.slot_bytes = round_up(k_bytes > v_bytes ? k_bytes : v_bytes, 1024);
  a.scales = 0;
  a.numbers = a.scales + a.keys * 4;
  a.v_scales = a.numbers + a.keys * 4;
  a.maxima = a.v_scales + a.keys * 4;  // the largest multiplier of V that each producer warp saw
  a.not_one = a.maxima + 16;  // a byte for each producer warp: 1 if it saw a multiplier but 1
  a.key_info_bytes = a.not_one + 16;
  const uint32_t tiles = a.keys / abi::kKvTile;
  a.k_tile_bytes = k_dim * (k_levels ? abi::kv_bits(k_format) : 16);
  a.v_tile_bytes = v_dim * (v_levels ? abi::kv_bits(v_format) : 16);
  const uint32_t k_stored = k_levels ? tiles * a.k_tile_bytes : 0;
  const uint32_t v_stored = v_levels ? tiles * a.v_tile_bytes : 0;
  a.stored_scales = k_stored > v_stored ? k_stored : v_stored;
  a.stored_bytes = a.stored_scales == 0 ? 0 : round_up(a.stored_scales + tiles * 32, 128);
  if (unpacked) a.stored_bytes = kProducers / 32 * kWarpMultipliers;
  a.q = kManyRowsStateBytes;
  // What K's and V's levels of a stage are multiplied by.
  a.operand_scales = a.q + a.groups * panels_of(k_dim) * a.q_panel;
  a.key_info =
      a.operand_scales + (unpacked || !(k_levels || v_levels) ? 0 : round_up(a.keys * 6, 16));
  a.slot = round_up(a.key_info + kKeyInfoStages * a.key_info_bytes, 1024);
  for (uint32_t slots = k_levels && v_levels && !unpacked ? 4 : kMaxSlots; slots >= 3; --slots) {
    a.stored = a.slot + slots * a.slot_bytes;
    // Items that go straight into slots need free ones; two are left to the consumers meanwhile.
    const uint32_t direct = slots > 4 ? slots - 2 : 2;
    a.ahead = direct;
    if (unpacked) {
      a.total = a.stored + kKeyInfoStages * a.stored_bytes;
      a.slots = slots;
      if (a.total <= budget) return a;
      continue;
    }
    if (a.stored_bytes != 0) {
      const uint32_t left = a.stored < budget ? (budget - a.stored) / a.stored_bytes : 0;
      const uint32_t limit = k_levels && v_levels ? kMaxSlots : direct;
      a.ahead = left < limit ? left : limit;
    }
    a.total = a.stored + (a.stored_bytes != 0 ? a.ahead * a.stored_bytes : 0);
    a.slots = slots;
    if (a.ahead >= 2 && a.total <= budget) return a;
  }
  a.slots = 0;
  return a;
}

// Draft tokens over pages: the keys of a group, from the step schedule, the rows of a work item,
// and the scratch of a call: counters, then for each block the states of the groups of one work
// item.
constexpr abi::AttentionCut kManyRowsCut = {1024, 16};
constexpr uint64_t many_rows_item_rows(uint64_t max_query_length, uint64_t group) {
  const uint64_t rows = max_query_length * group;
  return rows < kGroupRows ? rows : kGroupRows;
}
constexpr uint64_t many_rows_scratch_floats(uint64_t item_rows, uint32_t v_dim, uint32_t blocks) {
  return paged_counter_bytes(blocks) / 4 +
         blocks * (kManyRowsCut.max_splits * item_rows * (v_dim + 2));
}

}  // namespace gyre::cuda
