#pragma once
// Where a row of a step goes: Where is abi::KvState, a cache's state in device memory, or the type
// of a list's slots. Every lane of the warp comes, with the same token and head.
#include "abi/rope_append.h"
#include "cuda/kernels/slot_list.cuh"
#include "cuda/kernels/store_quads.cuh"

namespace gyre::cuda {

// at: source, codes, scales, sink tokens and tail.
struct StepRow {
  uint32_t stream, token, head;
  const uint64_t* at;
};

template <class Slot>
__device__ RowTarget write_target(const abi::KvWriteParams& p, const StepRow& row, uint64_t slots) {
  const FoundSlot found = find_slot(SlotList<Slot>(p, slots), row.token);
  const TilePlace tile =
      place_in_page(p, p.stream[row.stream].cache, row.at, found.slot / abi::kKvTile, row.head);
  return {found.stored, found.shared, static_cast<uint32_t>(found.slot % abi::kKvTile), tile,
          nullptr};
}

__device__ inline RowTarget append_target(const abi::KvAppendParams& p, const StepRow& row,
                                          uint64_t address) {
  const abi::KvState state = *pointer<const abi::KvState>(address);
  const abi::KvAppendStream& s = p.stream[row.stream];
  const uint64_t key = state.start + row.token;
  const bool valid = key < abi::append_keys(p, state).end;
  const bool stored = valid && key >= p.places.sink_tokens;
  const uint64_t near = valid ? abi::append_near_offset(p.places, s, key, row.head) : abi::kNoNear;
  const uint64_t slot =
      abi::kv_slot(stored ? key - p.places.sink_tokens : 0, p.places.body_capacity);
  const uint64_t tile = slot / abi::kKvTile;
  const TilePlace place{pointer<uint8_t>(row.at[1] + row.head * s.body.codes_head_stride +
                                         tile * s.body.codes_tile_stride),
                        pointer<uint8_t>(row.at[2] + row.head * s.body.scales_head_stride +
                                         tile * s.body.scales_tile_stride)};
  return {stored, p.tokens > 1, static_cast<uint32_t>(slot % abi::kKvTile), place,
          near != abi::kNoNear ? pointer<Half>(row.at[3] + near) : nullptr};
}

template <class Where>
__device__ RowTarget step_target(const abi::RopeAppendParams& p, const StepRow& row,
                                 uint64_t where) {
  if constexpr (is_same_type<Where, abi::KvState>) return append_target(p.append, row, where);
  if constexpr (!is_same_type<Where, abi::KvState>) return write_target<Where>(p.write, row, where);
}

}  // namespace gyre::cuda
