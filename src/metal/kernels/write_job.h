#pragma once
// Where the tokens of a write go (abi/write.h): the tile of a simdgroup, and its tokens.
#include "abi/write.h"
#include "metal/kernels/cache_state.h"
#include "metal/kernels/tile.h"
#include "metal/kernels/tile_work.h"

namespace gyre {
namespace metal {

struct ListedSlots {
  const device uchar* at;
  uint slot_bytes;  // 4 or 8

  ulong operator()(ulong token) const {
    if (slot_bytes == 8) return pointer<ulong>(at)[token];
    return static_cast<ulong>(static_cast<long>(pointer<int>(at)[token]));
  }
};
using SlotList = abi::SlotList<ListedSlots>;

// The last token for slot `nth` of the leader's tile, or `tokens` if there is none.
inline ulong last_token(const thread SlotList& list, ulong leader, uint nth) {
  const ulong wanted = list.tile(leader) * abi::kKvTile + nth;
  ulong found = list.tokens;
  for (ulong t = leader; t < list.tokens; ++t) found = list.slot(t) == wanted ? t : found;
  return found;
}

// Where a stream's rows come from and go to.
struct StoredStream {
  const device uchar* source;
  device uchar* codes;
  device uchar* scales;
  device uchar* f16;  // sink tokens and tail
  bool aligned;       // codes
};

inline TileJob tile_job(constant abi::KvCacheLayout& cache, const thread StoredStream& to,
                        bool present, ulong token, ulong page, ulong tile, uint head, uint lane) {
  return {slot_mask(present, lane),
          token,
          {to.codes + page + head * cache.codes_head_stride + tile * cache.codes_tile_stride,
           to.scales + page + head * cache.scales_head_stride + tile * cache.scales_tile_stride,
           is_wide_cache(cache, to.aligned)},
          {nullptr, abi::kNoF16Row},
          true};
}

// The tile that the simdgroup's token leads, if it does.
inline TileJob listed_job(constant abi::WriteParams& p, constant abi::KvCacheLayout& cache,
                          const device uchar* slots, const thread StoredStream& to, ulong leader,
                          uint head, uint lane) {
  const SlotList list = {
      {slots, p.pages.slot_bytes}, p.tokens, p.pages.pages * p.pages.page_tokens};
  const bool leads = leader < p.tokens && list.leads(leader);
  const ulong tile = leads ? list.tile(leader) : 0;
  const ulong token = leads ? last_token(list, leader, lane % abi::kKvTile) : p.tokens;
  const uint page_tiles = p.pages.page_tokens / abi::kKvTile;
  const ulong page = tile / page_tiles;
  return tile_job(cache, to, token < p.tokens, token, page * p.pages.page_stride,
                  tile - page * page_tiles, head, lane);
}

// A tile of a range or of the body, or behind the body's tiles 8 tokens for the sink tokens.
inline TileJob run_job(constant abi::WriteParams& p, constant abi::WriteStream& s,
                       const device uchar* where, const thread StoredStream& to, ulong number,
                       uint head, uint lane) {
  const bool has_state = p.where == abi::kWriteState;
  const ulong nth = lane % abi::kKvTile;
  abi::KvState state = {0, 0, 0};
  // Member by member: a struct's copy constructor takes no reference to constant memory.
  constant abi::SlotRun& range = p.run;
  abi::SlotRun run = {range.first_token, range.tokens, range.first_slot, range.capacity,
                      range.first_tile,  range.tiles,  range.all_tiles};
  if (has_state) {
    state = load_state(where);
    run = abi::append_run(p, state);
  }
  const bool is_body = !has_state || number < abi::append_max_tiles(p);
  ulong tile = 0, token = 0;
  bool present = false;
  if (!is_body) {
    token = (number - abi::append_max_tiles(p)) * abi::kKvTile + nth;
    const ulong key = state.start + token;
    present = key < p.places.sink_tokens && key < abi::append_keys(p, state).end;
  } else if (number < run.tiles) {
    tile = run.tile(number);
    const ulong slot = tile * abi::kKvTile + nth;
    present = run.has(slot);
    token = run.token(slot);
  }
  TileJob job = tile_job(s.cache, to, present, token, 0, tile, head, lane);
  job.is_body = is_body;
  if (has_state) job.f16 = {to.f16, abi::append_f16_offset(p.places, s, state.start + token, head)};
  return job;
}

inline TileJob write_job(constant abi::WriteParams& p, uint stream, const device uchar* where,
                         const thread StoredStream& to, ulong number, uint head, uint lane) {
  constant abi::WriteStream& s = p.stream[stream];
  return p.where == abi::kWriteSlots ? listed_job(p, s.cache, where, to, number, head, lane)
                                     : run_job(p, s, where, to, number, head, lane);
}

}  // namespace metal
}  // namespace gyre
