#pragma once
// A write of few tokens: a warp writes a row of K or V (quad_row.cuh, store_quads.cuh). Only the
// rows themselves come from the command ahead: where they go and the old words of V's tiles are
// read before pdl_wait where EarlyBits::early allows it. Where is abi::KvState, a cache's state in
// device memory, or the type of a list's slots.
#include "abi/write.h"
#include "cuda/kernels/kernel_args.cuh"
#include "cuda/kernels/slots.cuh"
#include "cuda/kernels/store_quads.cuh"

namespace gyre::cuda {

// at: source, codes, scales, sink tokens and tail.
struct StepRow {
  uint32_t stream, token, head;
  const uint64_t* at;
};

// Every lane of the warp comes, with the same row.
template <class Slot>
__device__ RowTarget write_target(const abi::WriteParams& p, const StepRow& row, uint64_t slots) {
  const SlotList<Slot> list = slot_list<Slot>(p, slots);
  const auto tokens = static_cast<uint32_t>(list.tokens);
  const uint64_t own = list.slot(row.token);
  uint32_t later = 0, other = 0;
#pragma unroll 1
  for (uint32_t t = threadIdx.x % 32; t < tokens; t += 32) {
    const uint64_t s = list.slot(t);
    if (t > row.token && s == own) later = 1;
    if (t != row.token && s / abi::kKvTile == own / abi::kKvTile) other = 1;
  }
  const bool stored = own < list.count && __any_sync(kAllLanes, later) == 0;
  const uint64_t slot = stored ? own : 0;
  return {
      stored, __any_sync(kAllLanes, other) != 0, static_cast<uint32_t>(slot % abi::kKvTile),
      address_in_page(p.pages, p.stream[row.stream].cache, row.at, slot / abi::kKvTile, row.head),
      nullptr};
}

__device__ inline RowTarget append_target(const abi::WriteParams& p, const StepRow& row,
                                          uint64_t address) {
  const abi::KvState state = *pointer<const abi::KvState>(address);
  const abi::WriteStream& s = p.stream[row.stream];
  const uint64_t key = state.start + row.token;
  const bool valid = key < abi::append_keys(p, state).end;
  const bool stored = valid && key >= p.places.sink_tokens;
  const uint64_t f16 = valid ? abi::append_f16_offset(p.places, s, key, row.head) : abi::kNoF16Row;
  const uint64_t slot =
      abi::kv_slot(stored ? key - p.places.sink_tokens : 0, p.places.body_capacity);
  return {stored, p.tokens > 1, static_cast<uint32_t>(slot % abi::kKvTile),
          address_in_cache(s.cache, row.at, slot / abi::kKvTile, row.head),
          f16 != abi::kNoF16Row ? pointer<Half>(row.at[3] + f16) : nullptr};
}

// Rows are stored as they come.
struct NoRotation {
  static constexpr bool kRotates = false;
};

template <class Source, uint32_t kFormat, class Where, uint32_t kQuads, class Rotation>
__device__ void write_stream_row(const abi::WriteParams& p, const EarlyArgs& args,
                                 uint32_t where_arg, const StepRow& row, const Rotation& rotation) {
  const abi::WriteStream& s = p.stream[row.stream];
  const QuadLanes<kQuads> lanes(s.cache.head_dim);
  const bool is_v = s.cache.role == kRoleV;
  const uint32_t bits = 1u << where_arg | (is_v ? 2u << stream_arg(where_arg, 1) : 0);
  const bool early = (args.early & bits) == bits;
  if (!early) pdl_wait();
  RowTarget to;
  if constexpr (is_same_type<Where, abi::KvState>) {
    to = append_target(p, row, args.at[where_arg]);
  } else {
    to = write_target<Where>(p, row, args.at[where_arg]);
  }
  OldCodes<kFormat, kQuads> old;
  if (is_v && to.stored) old.load(lanes, to.tile.codes);
  if (early) pdl_wait();
  if (!to.stored && to.f16 == nullptr) return;
  const uint64_t x =
      row.at[0] + row.token * s.source_token_stride + row.head * s.source_head_stride;
  const Source* from = pointer<const Source>(x);
  if constexpr (Rotation::kRotates) {
    if (row.stream == 0) {
      rotation.rotate({x, row.token});
      from = rotation.row();
    }
  }
  const RawQuads<Source, kQuads> raw(lanes, from);
  if (to.f16 != nullptr) raw.copy_to(lanes, to.f16);
  if (to.stored) store_quads<kFormat>(s.cache, lanes, raw, old, to);
}

// Row `index` of K or of V: heads come before tokens. All lanes of the warp come.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Where, uint32_t kQuads,
          class Rotation>
__device__ void write_row(const abi::WriteParams& p, const EarlyArgs& args, uint32_t where_arg,
                          uint32_t stream, uint32_t index, const Rotation& rotation) {
  const auto heads = static_cast<uint32_t>(p.heads);
  const uint32_t token = index / heads;
  const StepRow row{stream, token, index - token * heads, args.at + stream_arg(where_arg, stream)};
  if constexpr (kFormatK == kFormatV) {
    write_stream_row<Source, kFormatK, Where, kQuads>(p, args, where_arg, row, rotation);
  } else if (stream == 0) {
    write_stream_row<Source, kFormatK, Where, kQuads>(p, args, where_arg, row, rotation);
  } else {
    write_stream_row<Source, kFormatV, Where, kQuads>(p, args, where_arg, row, NoRotation());
  }
}

}  // namespace gyre::cuda
