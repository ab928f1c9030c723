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
  uint32_t starts_a, starts_b;  // of so many positions on, all keys of a chunk are there

  uint32_t tile(uint32_t index) const {
    return index < tiles_a ? first_tile + index : index - tiles_a;
  }
  // Of a chunk that begins there.
  bool whole(uint32_t begin) const {
    return begin - skip < starts_a || begin - tiles_a * abi::kKvTile < starts_b;
  }
  // 0, as there are less than 2^31 slots.
  uint32_t beyond() const {
    return (first_tile | tiles_a | tiles | skip | end_a | end_b | starts_a | starts_b) >> 31;
  }
  // Of the keys, from 0; those without one get something that is none.
  uint32_t key_of(uint32_t at) const {
    if (at < tiles_a * abi::kKvTile) return at >= skip && at < end_a ? at - skip : ~0u;
    return at < end_b ? at - tiles_a * abi::kKvTile + (end_a - skip) : ~0u;
  }
};

inline DecodeWalk decode_walk(uint32_t capacity, uint32_t slot, uint32_t count,
                              uint32_t chunk_keys) {
  DecodeWalk w = {};
  const uint32_t count_a = count < capacity - slot ? count : capacity - slot;
  const auto starts = [&](uint32_t keys) { return keys < chunk_keys ? 0 : keys - chunk_keys + 1; };
  w.first_tile = opaque(slot / abi::kKvTile);
  w.skip = opaque(slot % abi::kKvTile);
  w.end_a = opaque(w.skip + count_a);
  w.tiles_a = opaque((w.end_a + abi::kKvTile - 1) / abi::kKvTile);
  w.end_b = opaque(w.tiles_a * abi::kKvTile + count - count_a);
  w.tiles = opaque((w.end_b + abi::kKvTile - 1) / abi::kKvTile);
  w.starts_a = opaque(starts(count_a));
  w.starts_b = opaque(starts(count - count_a));
  return w;
}

// The three bits of a slot's number, turned left: one turn is the order 0 2 4 6 1 3 5 7 in which
// slots 0 to 7 go, two turns 0 4 1 5 2 6 3 7.
constexpr uint32_t turned(uint32_t slot, uint32_t turns) {
  for (uint32_t i = 0; i < turns; ++i) slot = slot % 4 * 2 + slot / 4;
  return slot;
}

// Of an address that is a multiple of so many bytes: bits that none has.
template <uint32_t kMultiple>
inline uint32_t misplaced_bits(const void* at) {
  const auto bits = reinterpret_cast<uint64_t>(at);
  return (static_cast<uint32_t>(bits) & (kMultiple - 1)) | static_cast<uint32_t>(bits >> 32) >> 24;
}

// Rows of 16-byte pieces on their way into a stage: kSlots of them to a tile (8, or 1: whole
// tiles), kStride apart (0: as the caller says). Pieces of a row are mixed by kSwap times the last
// bits, under kMask, of where it lies. kTurns: rows of a tile in another order. A lane takes every
// 32nd piece; where it begins is found once.
template <uint32_t kRowCount, uint32_t kBytes, uint32_t kSlots, uint32_t kPitch, uint32_t kStride,
          uint32_t kSwap = 0, uint32_t kMask = 0, uint32_t kTurns = 0>
class RowCopy {
 public:
  static constexpr uint32_t kPieces = kBytes / 16, kAllPieces = kRowCount * kPieces;
  static_assert(kPieces % kWarp == 0 || kWarp % kPieces == 0);

  RowCopy(const uint8_t* from, uint32_t tile_stride, bool kept)
      : stride_(tile_stride / kSlots),
        mine_(from + lane() / kPieces * stride() + lane() % kPieces * 16),
        place_(place_of(lane())) {
    // Where registers are short, these are found anew each time.
    if (kept) mine_ = keep(mine_), place_ = keep(place_);
  }

  // 0, as places are multiples of 16 bytes.
  uint32_t misplaced() const { return misplaced_bits<16>(mine_); }

  // All rows are there.
  void whole(uint32_t tile, unsigned char* to) const {
    const uint8_t* const from = mine_ + uint64_t{tile * kSlots} * stride();
    const SharedAddress first = opaque(shared_address(to) + place_);
#pragma unroll
    for (uint32_t i = 0; i < (kAllPieces + kWarp - 1) / kWarp; ++i) {
      const uint32_t on = i * kWarp;  // pieces further
      const uint64_t offset = uint64_t{on / kPieces} * stride() + on % kPieces * 16;
      if (kAllPieces >= kWarp || lane() < kAllPieces)
        copy_async<16>(kAlike ? first + place_of(on) : shared_address(to) + place_of(lane() + on),
                       from + offset, true);
    }
  }

  // Each is looked at.
  void some(const DecodeWalk& walk, uint32_t tile, unsigned char* to) const {
    const uint8_t* const first = mine_ - lane() / kPieces * stride() - lane() % kPieces * 16;
#pragma unroll 1
    for (uint32_t at = lane(); at < kAllPieces; at += kWarp) {
      const uint32_t row = at / kPieces, index = tile + row / kSlots;
      const bool present = index < walk.tiles &&
                           (kSlots == 1 || walk.key_of(index * abi::kKvTile + row % kSlots) != ~0u);
      const uint32_t tile_at = walk.tile(present ? index : 0);
      const uint8_t* const source =
          first + uint64_t{tile_at * kSlots + row % kSlots} * stride() + at % kPieces * 16;
      copy_async<16>(shared_address(to) + place_of(at), present ? source : first, present);
    }
  }

 private:
  // Pieces further by a multiple of 32 lie in a place further by a constant.
  static constexpr bool kAlike =
      (kPieces < kWarp && kWarp / kPieces % 8 == 0) || (kSlots == 1 && kSwap == 0);

  static uint32_t lane() { return threadIdx.x % kWarp; }
  uint32_t stride() const { return kStride != 0 ? kStride : stride_; }
  static uint32_t place_of(uint32_t at) {
    const uint32_t row = at / kPieces, piece = at % kPieces;
    const uint32_t slot = turned(row % kSlots, kTurns);
    return row / kSlots * kPitch + slot * kBytes + (piece ^ (slot & kMask) * kSwap) * 16;
  }

  uint32_t stride_;  // of rows
  const uint8_t* mine_;
  uint32_t place_;
};

// Scales of K and of V, 16 bytes for each tile and block: one piece to a lane.
template <uint32_t kTiles, uint32_t kBlocks, bool kOfK, bool kOfV>
class ScaleCopy {
  static constexpr uint32_t kEach = kTiles * kBlocks;
  static constexpr uint32_t kPieces = kEach * ((kOfK ? 1 : 0) + (kOfV ? 1 : 0));
  static_assert(kPieces <= kWarp);

 public:
  ScaleCopy(const uint8_t* k, const uint8_t* v)
      : first_(kOfK && lane() < kEach ? k : v), mine_(first_ + lane() % kEach * 16) {}

  uint32_t misplaced() const { return misplaced_bits<16>(mine_); }
  void whole(uint32_t tile, unsigned char* to) const {
    if (lane() < kPieces)
      copy_async<16>(shared_address(to) + lane() * 16, mine_ + uint64_t{tile} * (kBlocks * 16),
                     true);
  }
  void some(const DecodeWalk& walk, uint32_t tile, unsigned char* to) const {
    if (lane() >= kPieces) return;
    const uint32_t index = tile + lane() % kEach / kBlocks;
    const bool present = index < walk.tiles;
    const uint8_t* const source =
        first_ + (uint64_t{walk.tile(present ? index : 0)} * kBlocks + lane() % kBlocks) * 16;
    copy_async<16>(shared_address(to) + lane() * 16, present ? source : first_, present);
  }

 private:
  static uint32_t lane() { return threadIdx.x % kWarp; }
  const uint8_t *first_, *mine_;
};

struct NoCopy {
  template <class... Any>
  explicit NoCopy(const Any&...) {}
  uint32_t misplaced() const { return 0; }
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

// Everything a warp has of a chunk, of one KV head. Compressed caches have no gaps.
template <class Shape>
class ChunkCopy {
  static constexpr DecodeShape kShape = Shape::kShape;
  static constexpr uint32_t kKeys = kShape.keys, kTiles = kShape.tiles;
  static constexpr bool kKept = Shape::kKeepsPlaces;
  static constexpr uint32_t kSome = 16;  // where there is no such plane
  static constexpr uint32_t kStrideK = Shape::kLevelsK ? kShape.k_row : 0;
  static constexpr uint32_t kStrideV = Shape::kLevelsV ? kShape.v_tile : 0;
  template <uint32_t kBytes, uint32_t kPitch>
  using Keys = typename Choose<kBytes != 0,
                               RowCopy<kKeys, (kBytes != 0 ? kBytes : kSome), 8, kPitch, kStrideK,
                                       (kBytes >= 128 ? 4 : 0), 1, Shape::kTurns>,
                               NoCopy>::type;
  template <uint32_t kBytes, uint32_t kPitch>
  using Tiles =
      typename Choose<kBytes != 0,
                      RowCopy<kTiles, (kBytes != 0 ? kBytes : kSome), 1, kPitch, kStrideV>,
                      NoCopy>::type;
  template <uint32_t kBytes, uint32_t kPitch>
  using Values =
      typename Choose<Shape::kLevelsV, Tiles<kBytes, kPitch>,
                      RowCopy<kKeys, (Shape::kLevelsV ? kSome : kBytes), 8, kPitch, 0, 1, 7>>::type;

 public:
  ChunkCopy(const abi::AttentionParams& p, uint64_t k_codes, uint64_t k_scales, uint64_t v_codes,
            uint64_t v_scales, uint32_t kv_head, uint32_t part)
      : k_(begin(k_codes, kv_head * p.k.codes_head_stride, kShape.k[0], part),
           stride(p.k.codes_tile_stride), kKept),
        k2_(begin(k_codes, kv_head * p.k.codes_head_stride, kShape.k[1], part),
            stride(p.k.codes_tile_stride), kKept),
        v_(begin(v_codes, kv_head * p.v.codes_head_stride, kShape.v[0], part),
           stride(p.v.codes_tile_stride), kKept),
        v2_(begin(v_codes, kv_head * p.v.codes_head_stride, kShape.v[1], part),
            stride(p.v.codes_tile_stride), kKept),
        scales_(begin(k_scales, kv_head * p.k.scales_head_stride, {}, 0),
                begin(v_scales, kv_head * p.v.scales_head_stride, {}, 0)) {}

  uint32_t misplaced() const {
    return k_.misplaced() | k2_.misplaced() | v_.misplaced() | v2_.misplaced() |
           scales_.misplaced();
  }

  // If there is such a chunk. Keys that are not there become zeros: a value could be NaN.
  void start(const DecodeWalk& walk, uint32_t chunk, unsigned char* to) const {
    const uint32_t tile = chunk * kTiles;
    if (walk.whole(chunk * kKeys)) {
      const uint32_t first = walk.tile(tile);
      each(to, [first](const auto& copy, unsigned char* at) { copy.whole(first, at); });
    } else if (tile < walk.tiles) {
      each(to, [&](const auto& copy, unsigned char* at) { copy.some(walk, tile, at); });
    }
    copy_commit();
  }

 private:
  static const uint8_t* begin(uint64_t array, uint64_t offset, const DecodePlane& plane,
                              uint32_t part) {
    return pointer<const uint8_t>(array) + offset + plane.from + part * plane.bytes;
  }
  static uint32_t stride(uint64_t bytes) { return static_cast<uint32_t>(bytes); }
  template <class Do>
  void each(unsigned char* to, const Do& run) const {
    run(k_, to + kShape.k[0].at);
    run(k2_, to + kShape.k[1].at);
    run(scales_, to + kShape.k_scales);
    run(v_, to + kShape.v[0].at);
    run(v2_, to + kShape.v[1].at);
  }

  Keys<kShape.k[0].bytes, kShape.k[0].tile_pitch> k_;
  Keys<kShape.k[1].bytes, kShape.k[1].tile_pitch> k2_;
  Values<kShape.v[0].bytes, kShape.v[0].tile_pitch> v_;
  Tiles<kShape.v[1].bytes, kShape.v[1].tile_pitch> v2_;
  typename Choose<Shape::kLevelsK || Shape::kLevelsV,
                  ScaleCopy<kTiles, Shape::kBlocks, Shape::kLevelsK, Shape::kLevelsV>, NoCopy>::type
      scales_;
};

// Of so many stages.
template <uint32_t kStages>
inline void wait_for_stage() {
  copy_wait<kStages - 2>();
  __syncwarp();
}

}  // namespace gyre::cuda
