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
  const uint32_t count_a = count < capacity - slot ? count : capacity - slot;
  w.first_tile = opaque(slot / abi::kKvTile);
  w.skip = opaque(slot % abi::kKvTile);
  w.end_a = opaque(w.skip + count_a);
  w.tiles_a = opaque((w.end_a + abi::kKvTile - 1) / abi::kKvTile);
  w.end_b = opaque(w.tiles_a * abi::kKvTile + count - count_a);
  w.tiles = opaque((w.end_b + abi::kKvTile - 1) / abi::kKvTile);
  return w;
}

// Rows of 16-byte pieces on their way into a stage: kSlots of them to a tile (8, or 1: whole
// tiles). Pieces of a row are mixed by kSwap times the last bits, under kMask, of where it lies.
// kTurned: rows in the order of value_item, 0 4 1 5 2 6 3 7. A lane takes every 32nd piece; where
// it begins is found once.
template <uint32_t kRowCount, uint32_t kBytes, uint32_t kSlots, uint32_t kPitch, uint32_t kSwap = 0,
          uint32_t kMask = 0, bool kTurned = false>
class RowCopy {
 public:
  static constexpr uint32_t kPieces = kBytes / 16, kAllPieces = kRowCount * kPieces;
  static_assert(kPieces % kWarp == 0 || kWarp % kPieces == 0);

  RowCopy(const uint8_t* from, uint32_t tile_stride, uint32_t* place)
      : stride_(tile_stride / kSlots),
        mine_(from + lane() / kPieces * stride_ + lane() % kPieces * 16),
        place_(place_of(lane())) {
    // Where registers are short, these are found anew each time.
    if (place != nullptr) mine_ = keep(mine_, place), place_ = keep(place_, place);
  }

  // All rows are there.
  void whole(uint32_t tile, unsigned char* to) const {
    const uint8_t* const from = mine_ + uint64_t{tile * kSlots} * stride_;
#pragma unroll
    for (uint32_t i = 0; i < (kAllPieces + kWarp - 1) / kWarp; ++i) {
      const uint32_t on = i * kWarp;  // pieces further
      const uint64_t offset = uint64_t{on / kPieces} * stride_ + on % kPieces * 16;
      if (kAllPieces >= kWarp || lane() < kAllPieces)
        copy_async<16>(to + further(on), from + offset, true);
    }
  }

  // Each is looked at.
  void some(const DecodeWalk& walk, uint32_t tile, unsigned char* to) const {
    const uint8_t* const first = mine_ - lane() / kPieces * stride_ - lane() % kPieces * 16;
#pragma unroll 1
    for (uint32_t at = lane(); at < kAllPieces; at += kWarp) {
      const uint32_t row = at / kPieces, index = tile + row / kSlots;
      const bool present = index < walk.tiles &&
                           (kSlots == 1 || walk.key_of(index * abi::kKvTile + row % kSlots) != ~0u);
      const uint32_t tile_at = walk.tile(present ? index : 0);
      const uint8_t* const source =
          first + uint64_t{tile_at * kSlots + row % kSlots} * stride_ + at % kPieces * 16;
      copy_async<16>(to + place_of(at), present ? source : first, present);
    }
  }

 private:
  static uint32_t lane() { return threadIdx.x % kWarp; }
  static uint32_t place_of(uint32_t at) {
    const uint32_t row = at / kPieces, piece = at % kPieces;
    const uint32_t slot = kTurned ? row % 4 * 2 + row / 4 % 2 : row % kSlots;
    return row / kSlots * kPitch + slot * kBytes + (piece ^ (slot & kMask) * kSwap) * 16;
  }

  // place_of(lane() + on) for a multiple of 32: the pieces or rows in between are a constant, but
  // for what is mixed.
  uint32_t further(uint32_t on) const {
    constexpr bool kWholeTiles = kPieces < kWarp && kWarp / kPieces % 8 == 0;
    if constexpr (kWholeTiles || (kSlots == 1 && kSwap == 0)) return place_ + place_of(on);
    return place_of(lane() + on);
  }

  uint32_t stride_;  // of rows
  const uint8_t* mine_;
  uint32_t place_;
};

struct NoCopy {
  NoCopy(const uint8_t*, uint32_t, uint32_t*) {}
  void whole(uint32_t, unsigned char*) const {}
  void some(const DecodeWalk&, uint32_t, unsigned char*) const {}
};
template <bool kFirst, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};

// Everything a chunk consists of, of one KV head.
template <class Shape>
class ChunkCopy {
  static constexpr DecodeShape kShape = Shape::kShape;
  static constexpr uint32_t kKeys = kShape.keys, kTiles = kShape.tiles;
  static constexpr uint32_t kScales = kShape.blocks * 16;
  static constexpr uint32_t kSome = 16;  // where there is no such plane
  template <uint32_t kBytes, uint32_t kPitch>
  using Keys = typename Choose<kBytes != 0,
                               RowCopy<kKeys, (kBytes != 0 ? kBytes : kSome), 8, kPitch,
                                       (kBytes >= 128 ? 4 : 0), 1, Shape::kTurned>,
                               NoCopy>::type;
  template <uint32_t kBytes, uint32_t kPitch>
  using Tiles =
      typename Choose<kBytes != 0, RowCopy<kTiles, (kBytes != 0 ? kBytes : kSome), 1, kPitch>,
                      NoCopy>::type;
  template <uint32_t kBytes, uint32_t kPitch>
  using Values =
      typename Choose<Shape::kLevelsV, Tiles<kBytes, kPitch>,
                      RowCopy<kKeys, (Shape::kLevelsV ? kSome : kBytes), 8, kPitch, 1, 7>>::type;

 public:
  ChunkCopy(const abi::AttentionParams& p, uint64_t k_codes, uint64_t k_scales, uint64_t v_codes,
            uint64_t v_scales, uint32_t kv_head, uint32_t* place)
      : k_(begin(k_codes, kv_head * p.k.codes_head_stride), stride(p.k.codes_tile_stride), place),
        k2_(begin(k_codes, kv_head * p.k.codes_head_stride) + kShape.k[1].from,
            stride(p.k.codes_tile_stride), place),
        v_(begin(v_codes, kv_head * p.v.codes_head_stride), stride(p.v.codes_tile_stride), place),
        v2_(begin(v_codes, kv_head * p.v.codes_head_stride) + kShape.v[1].from,
            stride(p.v.codes_tile_stride), place),
        k_scales_(begin(k_scales, kv_head * p.k.scales_head_stride), stride(p.k.scales_tile_stride),
                  place),
        v_scales_(begin(v_scales, kv_head * p.v.scales_head_stride), stride(p.v.scales_tile_stride),
                  place) {}

  // If there is such a chunk. Keys that are not there become zeros: a value could be NaN.
  void start(const DecodeWalk& walk, uint32_t chunk, unsigned char* to) const {
    const uint32_t tile = chunk * kTiles;
    if (tile < walk.tiles) {
      if (walk.whole(tile * abi::kKvTile, tile * abi::kKvTile + kKeys)) {
        const uint32_t first = walk.tile(tile);
        each(to, [first](const auto& copy, unsigned char* at) { copy.whole(first, at); });
      } else {
        each(to, [&](const auto& copy, unsigned char* at) { copy.some(walk, tile, at); });
      }
    }
    copy_commit();
  }

 private:
  static const uint8_t* begin(uint64_t array, uint64_t offset) {
    return pointer<const uint8_t>(array) + offset;
  }
  static uint32_t stride(uint64_t bytes) { return static_cast<uint32_t>(bytes); }
  template <class Do>
  void each(unsigned char* to, const Do& run) const {
    run(k_, to + kShape.k[0].at);
    run(k2_, to + kShape.k[1].at);
    run(k_scales_, to + kShape.k_scales);
    run(v_, to + kShape.v[0].at);
    run(v2_, to + kShape.v[1].at);
    run(v_scales_, to + kShape.v_scales);
  }

  Keys<kShape.k[0].bytes, kShape.k[0].tile_pitch> k_;
  Keys<kShape.k[1].bytes, kShape.k[1].tile_pitch> k2_;
  Values<kShape.v[0].bytes, kShape.v[0].tile_pitch> v_;
  Tiles<kShape.v[1].bytes, kShape.v[1].tile_pitch> v2_;
  Tiles<(Shape::kLevelsK ? kScales : 0), kScales> k_scales_;
  Tiles<(Shape::kLevelsV ? kScales : 0), kScales> v_scales_;
};

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
