#pragma once
// Decode attention: which keys a block has, and their way into shared memory, 16 bytes at a time
// and without waiting. A warp has a ring of stages of its own.
#include "args.cuh"
#include "attention_decode_plan.cuh"
#include "ptx.cuh"

namespace gyre::cuda {

// Keys [first, first + count) in slots: a part up to the ring's end, then one from its beginning.
// Positions are counted from slot 0 of the first tile.
struct DecodeWalk {
  uint32_t first_tile, tiles_a, tiles;
  uint32_t skip, end_a, end_b;  // positions with keys are [skip, end_a) and [8 tiles_a, end_b)

  uint32_t tile(uint32_t index) const {
    return index < tiles_a ? first_tile + index : index - tiles_a;
  }
  bool whole(uint32_t begin, uint32_t end) const {
    return (begin >= skip && end <= end_a) || (begin >= tiles_a * abi::kKvTile && end <= end_b);
  }
  // Of the keys, from 0; those without one get something that is none.
  uint32_t key_of(uint32_t at) const {
    if (at < tiles_a * abi::kKvTile) return at >= skip && at < end_a ? at - skip : ~0u;
    return at < end_b ? at - tiles_a * abi::kKvTile + (end_a - skip) : ~0u;
  }
};

inline DecodeWalk decode_walk(uint32_t capacity, uint32_t slot, uint32_t count) {
  DecodeWalk w = {};
  if (slot >= capacity) slot -= capacity;
  const uint32_t count_a = count < capacity - slot ? count : capacity - slot;
  w.first_tile = opaque(slot / abi::kKvTile);
  w.skip = opaque(slot % abi::kKvTile);
  w.end_a = opaque(w.skip + count_a);
  w.tiles_a = opaque((w.end_a + abi::kKvTile - 1) / abi::kKvTile);
  w.end_b = opaque(w.tiles_a * abi::kKvTile + count - count_a);
  w.tiles = opaque((w.end_b + abi::kKvTile - 1) / abi::kKvTile);
  return w;
}

// Of one KV head.
struct DecodeSource {
  const uint8_t *k_codes, *k_scales, *v_codes, *v_scales;
  uint32_t k_tile, k_scales_tile, v_tile, v_scales_tile;  // bytes from tile to tile
};

// How rows of 16-byte pieces lie in a stage: kSlots of them to a tile (8, or 1: whole tiles).
// Pieces of a row are mixed by kSwap times the last bits, under kMask, of where it lies. kTurned:
// rows in the order of value_item, 0 4 1 5 2 6 3 7.
template <uint32_t kRowCount, uint32_t kBytes, uint32_t kSlots, uint32_t kPitch, uint32_t kSwap = 0,
          uint32_t kMask = 0, bool kTurned = false>
struct RowCopy {
  static constexpr uint32_t kPieces = kBytes / 16, kAllPieces = kRowCount * kPieces;

  static uint32_t place(uint32_t at) {
    const uint32_t row = at / kPieces, piece = at % kPieces;
    const uint32_t slot = kTurned ? row % 4 * 2 + row / 4 % 2 : row % kSlots;
    return row / kSlots * kPitch + slot * kBytes + (piece ^ (slot & kMask) * kSwap) * 16;
  }

  static void run(const uint8_t* from, uint32_t tile_stride, const DecodeWalk& walk, uint32_t tile,
                  bool whole, unsigned char* to) {
    const uint32_t lane = threadIdx.x % kWarp, stride = tile_stride / kSlots;
    if (whole) {
      from += uint64_t{walk.tile(tile)} * tile_stride;
#pragma unroll
      for (uint32_t i = 0; i < (kAllPieces + kWarp - 1) / kWarp; ++i) {
        const uint32_t at = lane + i * kWarp;
        if (kAllPieces % kWarp == 0 || at < kAllPieces)
          copy_async<16>(to + place(at), from + at / kPieces * stride + at % kPieces * 16, true);
      }
      return;
    }
#pragma unroll 1
    for (uint32_t at = lane; at < kAllPieces; at += kWarp) {
      const uint32_t row = at / kPieces, index = tile + row / kSlots;
      const bool present = index < walk.tiles &&
                           (kSlots == 1 || walk.key_of(index * abi::kKvTile + row % kSlots) != ~0u);
      const uint8_t* const source = from + uint64_t{walk.tile(present ? index : 0)} * tile_stride +
                                    row % kSlots * stride + at % kPieces * 16;
      copy_async<16>(to + place(at), present ? source : from, present);
    }
  }
};

// Asks for the keys and values of a chunk, if there is one. Keys that are not there become zeros:
// a value could be NaN.
template <class Shape>
inline void load_chunk(const DecodeSource& s, const DecodeWalk& walk, uint32_t chunk,
                       unsigned char* to) {
  constexpr DecodeShape kShape = Shape::kShape;
  constexpr uint32_t kKeys = kShape.keys, kTiles = kShape.tiles, kScales = kShape.blocks * 16;
  constexpr DecodePlane kK = kShape.k[0], kK2 = kShape.k[1], kV = kShape.v[0], kV2 = kShape.v[1];
  const uint32_t tile = chunk * kTiles;
  if (tile < walk.tiles) {
    const bool whole = walk.whole(tile * abi::kKvTile, tile * abi::kKvTile + kKeys);
    RowCopy<kKeys, kK.bytes, 8, kK.tile_pitch, (kK.bytes >= 128 ? 4 : 0), 1, Shape::kTurned>::run(
        s.k_codes, s.k_tile, walk, tile, whole, to + kK.at);
    if constexpr (kK2.bytes != 0) {
      RowCopy<kKeys, kK2.bytes, 8, kK2.tile_pitch, (kK2.bytes >= 128 ? 4 : 0), 1,
              Shape::kTurned>::run(s.k_codes + kK2.from, s.k_tile, walk, tile, whole, to + kK2.at);
    }
    if constexpr (Shape::kLevelsK) {
      RowCopy<kTiles, kScales, 1, kScales>::run(s.k_scales, s.k_scales_tile, walk, tile, whole,
                                                to + kShape.k_scales);
    }
    if constexpr (Shape::kLevelsV) {
      RowCopy<kTiles, kV.bytes, 1, kV.tile_pitch>::run(s.v_codes, s.v_tile, walk, tile, whole,
                                                       to + kV.at);
      if constexpr (kV2.bytes != 0) {
        RowCopy<kTiles, kV2.bytes, 1, kV2.tile_pitch>::run(s.v_codes + kV2.from, s.v_tile, walk,
                                                           tile, whole, to + kV2.at);
      }
      RowCopy<kTiles, kScales, 1, kScales>::run(s.v_scales, s.v_scales_tile, walk, tile, whole,
                                                to + kShape.v_scales);
    } else {
      RowCopy<kKeys, kV.bytes, 8, kV.tile_pitch, 1, 7>::run(s.v_codes, s.v_tile, walk, tile, whole,
                                                            to + kV.at);
    }
  }
  copy_commit();
}

inline void wait_for_stage(uint32_t stages) {
  if (stages == 2) {
    copy_wait<0>();
  } else if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<2>();
  }
  __syncwarp();
}

}  // namespace gyre::cuda
