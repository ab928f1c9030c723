#pragma once
// Where the tokens of a list of slots go, in pages. The list is device data and may hold anything.
#include "abi/kv_write.h"
#include "metal/kernels/tile.h"
#include "metal/kernels/tile_work.h"

namespace gyre {
namespace metal {

constant constexpr ulong kNoTile = ~ulong(0);

struct SlotList {
  const device uchar* slots;
  uint slot_bytes;      // 4 or 8
  ulong tokens, count;  // of slots in the pages

  ulong slot(ulong token) const {
    if (slot_bytes == 8) return pointer<ulong>(slots)[token];
    return static_cast<ulong>(static_cast<long>(pointer<int>(slots)[token]));
  }
  // A negative slot is beyond every count.
  ulong tile(ulong token) const {
    const ulong s = slot(token);
    return s < count ? s / abi::kKvTile : kNoTile;
  }
  // Whether the token is the first of its tile; the token before usually decides.
  bool leads(ulong token) const {
    const ulong own = tile(token);
    if (own == kNoTile) return false;
    for (ulong t = token; t != 0; --t) {
      if (tile(t - 1) == own) return false;
    }
    return true;
  }
  // The last token for slot `nth` of the leader's tile, or `tokens` if there is none.
  ulong find(ulong leader, uint nth) const {
    const ulong wanted = tile(leader) * abi::kKvTile + nth;
    ulong found = tokens;
    for (ulong t = leader; t < tokens; ++t) found = slot(t) == wanted ? t : found;
    return found;
  }
};

// Codes and scales of a stream, in page 0.
struct PagePlaces {
  device uchar* codes;
  device uchar* scales;
  bool aligned;  // codes
};

// The work of the simdgroup of a token: the tile that it leads, if it does.
inline TileJob write_job(constant abi::KvWriteParams& p, constant abi::KvCacheLayout& cache,
                         const thread SlotList& list, const thread PagePlaces& to, ulong leader,
                         uint head, uint lane) {
  const bool leads = leader < p.tokens && list.leads(leader);
  const ulong tile = leads ? list.tile(leader) : 0;
  const ulong token = leads ? list.find(leader, lane % abi::kKvTile) : p.tokens;
  const uint page_tiles = p.page_tokens / abi::kKvTile;
  const ulong page = tile / page_tiles, in_page = tile - page * page_tiles;
  return {slot_mask(token < p.tokens, lane),
          token,
          {to.codes + page * p.page_stride + head * cache.codes_head_stride +
               in_page * cache.codes_tile_stride,
           to.scales + page * p.page_stride + head * cache.scales_head_stride +
               in_page * cache.scales_tile_stride,
           is_wide_cache(cache, to.aligned)},
          {nullptr, abi::kNoNear},
          true};
}

}  // namespace metal
}  // namespace gyre
