#pragma once
// What one block works on: up to 16 rows of one KV head and a range of keys. Keys are walked in
// tiles of 8 slots, a chunk of tiles at a time; the bytes of a chunk come to shared memory as they
// are stored, while earlier chunks are worked on.
#include "args.cuh"
#include "attention_plan.cuh"
#include "codec.cuh"
#include "softmax.cuh"

namespace gyre::cuda {

// A division of 64 bits takes ten times as long as one of 32, which mostly does.
inline uint64_t divide(uint64_t a, uint64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Of a row, in shared memory.
struct Rows {
  int64_t begin[kMostRows], end[kMostRows];  // keys it may see
  int64_t position[kMostRows];
  float factor[kMostRows][2];  // what its scores are multiplied with, in two steps
  float max[kMostRows], sum[kMostRows], keep[kMostRows], slope[kMostRows];
  uint32_t hidden;  // some row does not see some key of the chunk
};
// The tiles of a range of keys: up to the ring's end, then from its beginning.
struct Walk {
  int64_t key;          // of lane 0 of the first tile
  uint64_t first_tile;  // lanes are counted from its slot 0
  uint64_t skip, count_a, count;
  uint64_t tiles_a, tiles;

  uint64_t tile(uint64_t index) const {
    return index < tiles_a ? first_tile + index : index - tiles_a;
  }
  bool valid(uint64_t lane) const {
    if (lane < tiles_a * abi::kKvTile) return lane >= skip && lane < skip + count_a;
    return lane - tiles_a * abi::kKvTile < count - count_a;
  }
  int64_t key_of(uint64_t lane) const {
    if (lane < tiles_a * abi::kKvTile) return key + static_cast<int64_t>(lane);
    return key + static_cast<int64_t>(skip + count_a + lane - tiles_a * abi::kKvTile);
  }
};

// A chunk of consecutive slots that all hold keys, or one that has to be looked at slot by slot.
struct ChunkView {
  bool whole;
  uint64_t tile;  // of its first slot
  int64_t key;
};

inline ChunkView view_chunk(const Walk& w, uint64_t first_tile, uint32_t tiles) {
  const uint64_t begin = first_tile * abi::kKvTile, end = begin + tiles * abi::kKvTile;
  const bool a = begin >= w.skip && end <= w.skip + w.count_a;
  const bool b = first_tile >= w.tiles_a && end - w.tiles_a * abi::kKvTile <= w.count - w.count_a;
  return {a || b, w.tile(first_tile), w.key_of(begin)};
}

inline Walk make_walk(const abi::AttentionParams& p, int64_t first, int64_t last) {
  Walk w = {};
  if (last <= first) return w;
  const uint64_t from = p.ring_start + static_cast<uint64_t>(first);
  const uint64_t slot = from - divide(from, p.capacity) * p.capacity;
  w.count = static_cast<uint64_t>(last - first);
  w.count_a = abi::kv_least(w.count, p.capacity - slot);
  w.first_tile = slot / abi::kKvTile;
  w.skip = slot % abi::kKvTile;
  w.key = first - static_cast<int64_t>(w.skip);
  w.tiles_a = (w.skip + w.count_a + abi::kKvTile - 1) / abi::kKvTile;
  w.tiles = w.tiles_a + (w.count - w.count_a + abi::kKvTile - 1) / abi::kKvTile;
  return w;
}

// In shared memory, too: registers are for sums.
struct Unit {
  abi::AttentionParams params;
  AttentionPlan plan;
  Walk walk;
  uint64_t first_row;  // of the KV head's rows
  uint32_t rows;
  uint64_t index, blocks;  // of this unit, and how many there are
  uint64_t kv_head, group, split;
  int64_t first_key, last_key;                             // of the split
  const uint8_t *k_codes, *k_scales, *v_codes, *v_scales;  // of the head

  uint64_t token(uint32_t row) const { return divide(first_row + row, group); }
  uint64_t head(uint32_t row) const {
    return kv_head * group + first_row + row - token(row) * group;
  }
  Rows& state() const;
  // Not a member: the compiler is to see which memory it is.
  static unsigned char* shared() { return dynamic_shared(); }
  float* wide() const { return reinterpret_cast<float*>(shared() + plan.wide); }
  float* logits() const { return reinterpret_cast<float*>(shared() + plan.logits); }
  float2* factors() const { return reinterpret_cast<float2*>(shared() + plan.factors); }
  // Where a chunk is. Constants, because a division would cost more than the copy.
  unsigned char* stage(uint32_t chunk) const {
    const uint32_t at = plan.stages == 3 ? chunk % 3 : chunk & (plan.stages - 1);
    return shared() + plan.stage + at * plan.stage_bytes;
  }
};

struct BlockState {
  Rows rows;
  Unit unit;
};
static_assert(sizeof(BlockState) <= kStateBytes);

inline Rows& Unit::state() const { return reinterpret_cast<BlockState*>(shared())->rows; }

struct RowCopy {
  const uint8_t* from;
  uint64_t stride;  // of a tile
  uint64_t slot_stride;
  uint32_t slots;  // rows in a tile: 8, or 1 for whole tiles
  uint32_t rows, bytes, pitch;
  bool exact;  // rows without a key are zeros, and never read
};

// Rows of a chunk, `kUnit` bytes at a time; a power of two of lanes to a row.
template <uint32_t kUnit>
inline void copy_rows(const RowCopy& c, const Walk& walk, uint64_t first_tile, unsigned char* to) {
  const uint32_t pieces = c.bytes / kUnit;
  const uint32_t shift = pieces <= 1 ? 0 : (pieces > 16 ? 5 : 32 - __clz(pieces - 1));
  const uint32_t lane = threadIdx.x & ((1u << shift) - 1);
#pragma unroll 1
  for (uint32_t row = threadIdx.x >> shift; row < c.rows; row += blockDim.x >> shift) {
    const uint64_t index = first_tile + row / c.slots;
    const uint32_t slot = row % c.slots;
    const bool present =
        index < walk.tiles && (!c.exact || walk.valid(index * abi::kKvTile + slot));
    if (!present && !c.exact) continue;
    const uint8_t* const source =
        present ? c.from + walk.tile(index) * c.stride + slot * c.slot_stride : c.from;
    unsigned char* const target = to + row * c.pitch;
#pragma unroll 1
    for (uint32_t piece = lane; piece < pieces; piece += 1u << shift) {
      if constexpr (kUnit == 1) {
        target[piece] = present ? source[piece] : 0;
      } else {
        copy_async<kUnit>(shared_address(target + piece * kUnit),
                          source + (present ? piece * kUnit : 0), present);
      }
    }
  }
}

// All rows are there, one after the other.
inline void copy_whole(const RowCopy& c, uint64_t tile, unsigned char* to) {
  const uint32_t pieces = c.bytes / 16;
  const uint32_t shift = pieces <= 1 ? 0 : (pieces > 16 ? 5 : 32 - __clz(pieces - 1));
  const uint32_t lane = threadIdx.x & ((1u << shift) - 1), first = threadIdx.x >> shift;
  const uint32_t step = blockDim.x >> shift;
  const uint64_t stride = c.slots == 1 ? c.stride : c.slot_stride, jump = step * stride;
  const uint8_t* from = c.from + tile * c.stride + first * stride;
  to += first * c.pitch;
#pragma unroll 2
  for (uint32_t row = first; row < c.rows; row += step, from += jump, to += step * c.pitch) {
#pragma unroll 1
    for (uint32_t piece = lane; piece < pieces; piece += 1u << shift)
      copy_async<16>(shared_address(to + piece * 16), from + piece * 16, true);
  }
}

inline void copy_rows_any(const RowCopy& c, const Walk& walk, uint64_t first_tile,
                          const ChunkView& view, unsigned char* to) {
  const uint64_t all =
      reinterpret_cast<uint64_t>(c.from) | c.stride | c.slot_stride | uint64_t{c.bytes};
  if (all % 16 == 0 && view.whole) {
    copy_whole(c, view.tile, to);
  } else if (all % 16 == 0) {
    copy_rows<16>(c, walk, first_tile, to);
  } else if (all % 4 == 0) {
    copy_rows<4>(c, walk, first_tile, to);
  } else {
    copy_rows<1>(c, walk, first_tile, to);
  }
}

template <uint32_t kFormat, bool kValues>
inline RowCopy codes_copy(const Unit& u, const abi::KvCacheLayout& layout) {
  const uint8_t* const from = kValues ? u.v_codes : u.k_codes;
  const uint32_t pitch = kValues ? u.plan.v_pitch : u.plan.k_pitch;
  if constexpr (kValues && abi::kv_is_native(kFormat)) {
    return {from,
            layout.codes_tile_stride,
            0,
            1,
            u.plan.chunk / abi::kKvTile,
            layout.head_dim * abi::kv_bits(kFormat),
            pitch,
            false};
  }
  constexpr bool kNative = abi::kv_is_native(kFormat);
  const uint32_t bytes =
      kNative ? layout.head_dim * abi::kv_bits(kFormat) / 8 : layout.head_dim * 2;
  return {from,
          layout.codes_tile_stride,
          layout.codes_tile_stride / abi::kKvTile,
          abi::kKvTile,
          u.plan.chunk,
          bytes,
          pitch,
          !kNative};
}

// Asks for the bytes of a chunk, whichever of K and V are staged at all.
template <uint32_t kK, uint32_t kV>
inline void load_chunk(const Unit& u, const abi::AttentionParams& p, uint32_t chunk) {
  const uint32_t tiles = u.plan.chunk / abi::kKvTile;
  const uint64_t first = uint64_t{chunk} * tiles;
  unsigned char* const to = u.stage(chunk);
  if (first < u.walk.tiles) {
    const ChunkView view = view_chunk(u.walk, first, tiles);
    if constexpr (is_staged(kK))
      copy_rows_any(codes_copy<kK, false>(u, p.k), u.walk, first, view, to);
    if constexpr (abi::kv_is_native(kK)) {
      const uint32_t bytes = u.plan.k_blocks * 16;
      copy_rows_any({u.k_scales, p.k.scales_tile_stride, 0, 1, tiles, bytes, bytes, false}, u.walk,
                    first, view, to + u.plan.k_scales);
    }
    if constexpr (is_staged(kV))
      copy_rows_any(codes_copy<kV, true>(u, p.v), u.walk, first, view, to + u.plan.v_codes);
    if constexpr (abi::kv_is_native(kV)) {
      const uint32_t bytes = u.plan.v_blocks * 16;
      copy_rows_any({u.v_scales, p.v.scales_tile_stride, 0, 1, tiles, bytes, bytes, false}, u.walk,
                    first, view, to + u.plan.v_scales);
    }
  }
  copy_commit();
}

}  // namespace gyre::cuda
