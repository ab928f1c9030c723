// Where the keys of a step go in a cache whose state is in device memory.

#if defined(GYRE_CPU_KV_APPEND_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_APPEND_INL_H
#undef GYRE_CPU_KV_APPEND_INL_H
#else
#define GYRE_CPU_KV_APPEND_INL_H
#endif

#include <algorithm>

#include "abi/kv_append.h"
#include "cpu/kernels/kv_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

struct StreamPlaces {
  const std::byte* source;
  uint8_t* codes;
  uint8_t* scales;
  std::byte* near;
};

// Arguments as kv_append has them.
struct Append {
  const abi::KvAppendParams& p;
  const uint64_t* args;
  abi::KvKeys keys;
  abi::AppendRun run;

  Append(const abi::KvAppendParams& params, const uint64_t* arguments)
      : p(params), args(arguments) {
    const abi::KvState state = *pointer<const abi::KvState>(arguments[0]);
    keys = abi::append_keys(p, state);
    run = abi::append_run(p, state);
  }

  StreamPlaces places(uint64_t stream, uint64_t head) const {
    const abi::KvAppendStream& s = p.stream[stream];
    const uint64_t* const a = args + 1 + 4 * stream;
    return {pointer<const std::byte>(a[0]) + head * s.source_head_stride,
            pointer<uint8_t>(a[1]) + head * s.body.codes_head_stride,
            pointer<uint8_t>(a[2]) + head * s.body.scales_head_stride, pointer<std::byte>(a[3])};
  }
  bool has_near() const {
    return p.places.tail_capacity != 0 || keys.begin < std::min(p.places.sink_tokens, keys.end);
  }

  // Which tokens of the step enter a tile of the body.
  TileTokens tokens_of(uint64_t tile) const {
    TileTokens tokens;
    const uint64_t capacity = p.places.body_capacity;
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      const uint64_t place = tile * abi::kKvTile + slot;
      if (place >= capacity) break;
      const uint64_t key = run.key_of(place, capacity);
      if (key >= run.end_key) continue;
      tokens.mask |= 1u << slot;
      tokens.token[slot] = key - keys.begin;
    }
    return tokens;
  }
  // Without its sources.
  KvTileJob job_of(uint64_t stream, uint64_t head, uint64_t tile) const {
    const abi::KvCacheLayout& body = p.stream[stream].body;
    const StreamPlaces at = places(stream, head);
    KvTileJob job;
    job.stream = stream;
    job.codes = at.codes + tile * body.codes_tile_stride;
    job.scales = at.scales + tile * body.scales_tile_stride;
    std::fill(std::begin(job.next), std::end(job.next), nullptr);
    return job;
  }
  // The row of sink tokens or tail for a token of the step; null: it has none.
  Half* near_row(uint64_t stream, uint64_t head, uint64_t token) const {
    const uint64_t offset =
        abi::append_near_offset(p.places, p.stream[stream], keys.begin + token, head);
    if (offset == abi::kNoNear) return nullptr;
    return reinterpret_cast<Half*>(places(stream, head).near + offset);
  }
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
