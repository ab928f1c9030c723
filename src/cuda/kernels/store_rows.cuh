#pragma once
// Few rows: each by lanes of its own, without a tile of others. Codes of V share words with those
// of seven other tokens; where these may be written at the same time, bits are changed one by one.
#include "abi/rope_append.h"
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/slot_list.cuh"
#include "cuda/kernels/tile.cuh"

namespace gyre::cuda {

// Where a row goes.
struct RowTarget {
  bool stored;  // in the cache; sinks are not
  TilePlace tile;
  uint32_t slot;  // of the tile
  Half* near;     // in 16 bits, too; null: nowhere
};

// A cache's state, loaded before it is needed.
struct FewKeys {
  abi::KvState state;

  __device__ FewKeys(const abi::RopeAppendParams& /*p*/, uint64_t address)
      : state(*pointer<const abi::KvState>(address)) {}

  // Every lane of the warp comes, those of a row with the same.
  __device__ RowTarget target(const abi::RopeAppendParams& params, uint32_t stream,
                              const uint64_t* at, uint32_t token, uint32_t head,
                              bool exists) const {
    const abi::KvAppendParams& p = params.append;
    const abi::KvAppendStream& s = p.stream[stream];
    const uint64_t key = state.start + token;
    const bool valid = exists && key < abi::append_keys(p, state).end;
    const bool stored = valid && key >= p.places.sinks;
    const uint64_t near = valid ? abi::append_near_offset(p.places, s, key, head) : abi::kNoNear;
    const uint64_t slot = abi::kv_slot(stored ? key - p.places.sinks : 0, p.places.body_capacity);
    const uint64_t tile = slot / abi::kKvTile;
    // No early returns: NVRTC would take minutes.
    const RowTarget to{stored,
                       {pointer<uint8_t>(at[1] + head * s.body.codes_head_stride +
                                         tile * s.body.codes_tile_stride),
                        pointer<uint8_t>(at[2] + head * s.body.scales_head_stride +
                                         tile * s.body.scales_tile_stride)},
                       static_cast<uint32_t>(slot % abi::kKvTile),
                       near != abi::kNoNear ? pointer<Half>(at[3] + near) : nullptr};
    return to;
  }
};

// A list of at most 32 slots, one to a lane.
template <class Slot>
struct FewSlots {
  static_assert(abi::kRopeFewTokens <= 32);
  uint64_t slot;  // the lane's; kNone: none

  static constexpr uint64_t kNone = ~uint64_t{0};

  __device__ FewSlots(const abi::RopeAppendParams& p, uint64_t address) {
    const SlotList<Slot> list(p.write, address);
    const uint32_t lane = threadIdx.x % 32;
    slot = lane < list.tokens ? list.slot(lane) : kNone;
    if (slot >= list.all) slot = kNone;
  }

  // Whether a later token of the run has the same slot: tokens of one tile follow each other, but
  // for those that are skipped.
  __device__ bool is_replaced(uint64_t wanted, uint32_t token) const {
    const uint32_t same = __ballot_sync(kAllLanes, slot == wanted ? 1 : 0);
    const bool ends = slot != kNone && slot / abi::kKvTile != wanted / abi::kKvTile;
    const uint32_t after = token >= 31 ? 0 : kAllLanes << (token + 1);
    const uint32_t stop = __ballot_sync(kAllLanes, ends ? 1 : 0) & after;
    return (same & after & (stop != 0 ? (stop & (0u - stop)) - 1 : kAllLanes)) != 0;
  }

  __device__ RowTarget target(const abi::RopeAppendParams& params, uint32_t stream,
                              const uint64_t* at, uint32_t token, uint32_t head,
                              bool exists) const {
    const uint64_t mine = __shfl_sync(kAllLanes, slot, static_cast<int>(token & 31));
    bool replaced = false;
    for (uint32_t lane = 0; lane < 32; lane += 4) {  // rows have 4 lanes or more
      const uint64_t wanted = __shfl_sync(kAllLanes, mine, static_cast<int>(lane));
      const uint32_t of = __shfl_sync(kAllLanes, token, static_cast<int>(lane));
      const bool found = is_replaced(wanted, of);
      if (threadIdx.x % 32 / 4 == lane / 4) replaced = found;
    }
    const bool stored = exists && mine != kNone && !replaced;
    const uint64_t place = stored ? mine : 0;
    const abi::KvWriteParams& p = params.write;
    const RowTarget to{stored,
                       place_in_page(p, p.stream[stream].cache, at, place / abi::kKvTile, head),
                       static_cast<uint32_t>(place % abi::kKvTile), nullptr};
    return to;
  }
};

template <class Where>
struct FewOf {
  using Type = FewSlots<Where>;
};
template <>
struct FewOf<abi::KvState> {
  using Type = FewKeys;
};

template <uint32_t kFormat, class In>
__device__ void store_coded_row(const abi::KvCacheLayout& cache, const RowTarget& to,
                                const PlainRow<In>& row, bool is_shared, TileShared& shared) {
  static_assert(abi::kRopeFewHeadDim <= 32 * kChunk);  // a chunk to a lane
  const RowPlace<1> at(cache.head_dim);
  const TileThread me(at.lanes);
  const float stretch = cache.role == kRoleV ? abi::kv_codec(kFormat).value_stretch : 1.0f;
  encode_row<kFormat>(at, me, row, stretch, shared);
  __syncwarp();
  if (!to.stored) return;
  const uint32_t count = static_cast<uint32_t>(cache.scales_tile_stride / (2 * abi::kKvTile));
  for (uint32_t i = at.lane; i < count; i += at.lanes) {
    const uint32_t value = shared.scales[me.tile][i][me.slot];
    uint8_t* const scale = to.tile.scales + 2 * (i * abi::kKvTile + to.slot);
    scale[0] = static_cast<uint8_t>(value), scale[1] = static_cast<uint8_t>(value >> 8);
  }
  const uint8_t* const codes =
      shared.codes + (me.tile * abi::kKvTile + me.slot) * at.lanes * kChunk;
  if (cache.role == kRoleV) {
    pack_token<kFormat>(codes, cache.head_dim, to.slot, is_shared, at.lane, at.lanes,
                        to.tile.codes);
  } else {
    pack_row<kFormat>(codes, cache.head_dim, at.lane, at.lanes,
                      to.tile.codes + to.slot * (cache.codes_tile_stride / abi::kKvTile));
  }
}

// All lanes of the warp come; `lanes` have one row.
template <uint32_t kFormat, class In>
__device__ void store_row(const abi::KvCacheLayout& cache, const RowTarget& to, const In* from,
                          uint32_t lanes, bool is_shared, TileShared& shared) {
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const PlainRow<In> row{from, to.stored};
  uint8_t* const codes = to.tile.codes + to.slot * (cache.codes_tile_stride / abi::kKvTile);
  if (to.near != nullptr) copy_row(from, to.near, cache.head_dim, lane, lanes);
  if (__any_sync(kAllLanes, to.stored ? 1 : 0) == 0) return;
  if constexpr (abi::kv_is_native(kFormat)) {
    store_coded_row<kFormat>(cache, to, row, is_shared, shared);
  } else if constexpr (abi::kv_is_compat(kFormat)) {
    compat_store_slots<kFormat, kFewSlots>(
        cache, row, codes,
        reinterpret_cast<float*>(to.tile.scales +
                                 to.slot * (cache.scales_tile_stride / abi::kKvTile)));
  } else if (to.stored) {
    copy_row(from, reinterpret_cast<typename DenseType<kFormat>::Type*>(codes), cache.head_dim,
             lane, lanes);
  }
}

}  // namespace gyre::cuda
