#pragma once
// Decode attention: K and V of a stage from global to shared memory by cp.async, 16 bytes at a
// time. A warp has a ring of stages of its own.
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// The three bits of a slot's number, rotated left: once gives the order 0 2 4 6 1 3 5 7 of slots 0
// to 7, twice 0 4 1 5 2 6 3 7.
constexpr uint32_t rotate_slot(uint32_t slot, uint32_t rotations) {
  for (uint32_t i = 0; i < rotations; ++i) slot = slot % 4 * 2 + slot / 4;
  return slot;
}

// Where the tiles of a stage lie in pages: lane t holds the page of tile t, and where in it.
struct PageTiles {
  uint64_t head;    // bytes from the first KV head to this one
  uint32_t stride;  // bytes from page to page
  uint32_t page, tile;

  struct Place {
    uint64_t offset;  // of page and head
    uint32_t tile;
  };
  // Where tile t lies; for all lanes of a warp together.
  Place of(uint32_t t) const {
    const uint32_t number = __shfl_sync(kAll, page, static_cast<int>(t));
    return {head + uint64_t{number} * stride, __shfl_sync(kAll, tile, static_cast<int>(t))};
  }
};

// Rows in chunks of 16 bytes: kSlots of them per tile (8, or 1: whole tiles), kStride apart (0: the
// caller's stride). XOR swizzle: a row's chunk index is XORed with kSwizzle times the bits under
// kMask of its slot. kRotations permutes the rows of a tile, see rotate_slot. A lane takes every
// 32nd chunk; its first source and target are computed once.
template <uint32_t kRowCount, uint32_t kBytes, uint32_t kSlots, uint32_t kPitch, uint32_t kStride,
          uint32_t kSwizzle = 0, uint32_t kMask = 0, uint32_t kRotations = 0,
          uint32_t kRowPitch = kBytes>
class RowLoad {
 public:
  static constexpr uint32_t kChunks = kBytes / 16, kAllChunks = kRowCount * kChunks;

  RowLoad(const uint8_t* from, uint32_t tile_stride, bool pinned)
      : stride_(tile_stride / kSlots),
        source_(from + lane() / kChunks * stride() + lane() % kChunks * 16),
        target_(target_of(lane())) {
    // Without registers to pin them, the compiler recomputes both in every stage.
    if (pinned) source_ = pin(source_), target_ = pin(target_);
  }

  uint32_t never_set() const { return cuda::never_set<16>(source_); }

  // Every row holds a key.
  void whole(uint32_t tile, unsigned char* to, uint64_t further = 0) const {
    const uint8_t* const from = source_ + further + uint64_t{tile * kSlots} * stride();
    const SharedAddress first = optimization_barrier(shared_address(to) + target_);
#pragma unroll
    for (uint32_t i = 0; i < (kAllChunks + kWarp - 1) / kWarp; ++i) {
      const uint32_t ahead = i * kWarp;  // chunks
      if (kAllChunks % kWarp == 0 || lane() + ahead < kAllChunks)
        copy_async<16>(kUniformStep ? first + target_of(ahead)
                                    : shared_address(to) + target_of(lane() + ahead),
                       from + distance(ahead), true);
    }
  }

  // Every row holds a key, but tiles lie in different pages.
  void across(const PageTiles& pages, unsigned char* to) const {
#pragma unroll
    for (uint32_t i = 0; i < (kAllChunks + kWarp - 1) / kWarp; ++i) {
      const uint32_t at = lane() + i * kWarp, row = at / kChunks;
      const PageTiles::Place place = pages.of(row / kSlots % kWarp);
      if (kAllChunks % kWarp == 0 || at < kAllChunks)
        copy_async<16>(shared_address(to) + target_of(at), paged_source(place, row, at), true);
    }
  }
  // Some do, the others become zeros: keys [first_key, last_key) of the sequence, whose slot
  // `first` is the stage's first.
  void some_of(const PageTiles& pages, uint32_t first_key, uint32_t last_key, uint32_t first,
               unsigned char* to) const {
#pragma unroll 1
    for (uint32_t i = 0; i < (kAllChunks + kWarp - 1) / kWarp; ++i) {
      const uint32_t at = lane() + i * kWarp, row = at / kChunks;
      const PageTiles::Place place = pages.of(row / kSlots % kWarp);
      const bool present = first + row >= first_key && first + row < last_key;
      if (kAllChunks % kWarp == 0 || at < kAllChunks)
        copy_async<16>(shared_address(to) + target_of(at),
                       present ? paged_source(place, row, at) : source_, present);
    }
  }

  // Rows are checked one by one; those without a key become zeros.
  void some(const DecodeWalk& walk, uint32_t tile, unsigned char* to) const {
    const uint8_t* const first = first_row();
#pragma unroll 1
    for (uint32_t at = lane(); at < kAllChunks; at += kWarp) {
      const uint32_t row = at / kChunks, index = tile + row / kSlots;
      const bool present =
          index < walk.tiles && (kSlots == 1 || walk.valid(index * abi::kKvTile + row % kSlots));
      const uint32_t tile_at = walk.tile(present ? index : 0);
      const uint8_t* const source =
          first + uint64_t{tile_at * kSlots + row % kSlots} * stride() + at % kChunks * 16;
      copy_async<16>(shared_address(to) + target_of(at), present ? source : first, present);
    }
  }

 private:
  // Whole rows for a warp, or a warp for whole rows.
  static constexpr bool kEven = kChunks % kWarp == 0 || kWarp % kChunks == 0;
  // Targets of chunks 32 apart differ by the same constant in every lane.
  static constexpr bool kUniformStep =
      kEven && ((kChunks < kWarp && kWarp / kChunks % 8 == 0) || (kSlots == 1 && kSwizzle == 0));

  // Bytes from the source of the lane's first chunk to that of the one `ahead` of it.
  uint64_t distance(uint32_t ahead) const {
    if constexpr (kEven) return uint64_t{ahead / kChunks} * stride() + ahead % kChunks * 16;
    if constexpr (kSlots == 1 && kStride == kBytes) return ahead * 16;
    const uint32_t at = lane() + ahead, row = at / kChunks - lane() / kChunks;
    return uint64_t{row * stride()} + at % kChunks * 16 - lane() % kChunks * 16;
  }

  const uint8_t* first_row() const {
    return source_ - lane() / kChunks * stride() - lane() % kChunks * 16;
  }
  const uint8_t* paged_source(const PageTiles::Place& place, uint32_t row, uint32_t at) const {
    return first_row() + place.offset + uint64_t{place.tile * kSlots + row % kSlots} * stride() +
           at % kChunks * 16;
  }
  static uint32_t lane() { return threadIdx.x % kWarp; }
  uint32_t stride() const { return kStride != 0 ? kStride : stride_; }
  static uint32_t target_of(uint32_t at) {
    const uint32_t row = at / kChunks, chunk = at % kChunks;
    const uint32_t slot = rotate_slot(row % kSlots, kRotations);
    return row / kSlots * kPitch + slot * kRowPitch + (chunk ^ (slot & kMask) * kSwizzle) * 16;
  }

  uint32_t stride_;  // of rows
  const uint8_t* source_;
  uint32_t target_;
};

// Scales of K and V, 16 bytes per tile and scale block: mostly one chunk per lane. 0 blocks: none.
template <uint32_t kTiles, uint32_t kBlocksK, uint32_t kBlocksV>
class ScaleLoad {
  static constexpr uint32_t kOfK = kTiles * kBlocksK, kChunks = kOfK + kTiles * kBlocksV;
  static constexpr uint32_t kRounds = (kChunks + kWarp - 1) / kWarp;

 public:
  ScaleLoad(const uint8_t* k, const uint8_t* v) {
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      first_[i] = of_k(i) ? k : v;
      source_[i] = first_[i] + (tile(i) * blocks(i) + block(i)) * 16;
    }
  }

  uint32_t never_set() const { return cuda::never_set<16>(source_[0]); }
  void whole(uint32_t tile, unsigned char* to, uint64_t further = 0) const {
    each([&](uint32_t i) {
      copy_async<16>(shared_address(to) + at(i) * 16,
                     source_[i] + further + uint64_t{tile} * (blocks(i) * 16), true);
    });
  }
  void across(const PageTiles& pages, unsigned char* to) const {
    PageTiles::Place places[kRounds];
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) places[i] = pages.of(tile(i));
    each([&](uint32_t i) {
      copy_async<16>(shared_address(to) + at(i) * 16, paged_source(places[i], i), true);
    });
  }
  void some(const DecodeWalk& walk, uint32_t first, unsigned char* to) const {
    each([&](uint32_t i) {
      const uint32_t index = first + tile(i);
      const bool present = index < walk.tiles;
      const uint8_t* const source =
          first_[i] + (uint64_t{walk.tile(present ? index : 0)} * blocks(i) + block(i)) * 16;
      copy_async<16>(shared_address(to) + at(i) * 16, present ? source : first_[i], present);
    });
  }

 private:
  template <class Do>
  static void each(const Do& run) {
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
      if (at(i) < kChunks) run(i);
  }
  static uint32_t at(uint32_t i) { return threadIdx.x % kWarp + i * kWarp; }
  static bool of_k(uint32_t i) { return kOfK != 0 && (kBlocksV == 0 || at(i) < kOfK); }
  static uint32_t blocks(uint32_t i) {
    if constexpr (kBlocksK == kBlocksV || kBlocksV == 0) return kBlocksK;
    return of_k(i) ? kBlocksK : kBlocksV;
  }
  static uint32_t tile(uint32_t i) { return inside(i) / blocks(i) % kTiles; }
  static uint32_t block(uint32_t i) { return inside(i) % blocks(i); }
  static uint32_t inside(uint32_t i) {
    if constexpr (kBlocksK == kBlocksV || kBlocksK == 0 || kBlocksV == 0)
      return at(i) % (kTiles * blocks(i));
    return of_k(i) ? at(i) : at(i) - kOfK;
  }
  const uint8_t* paged_source(const PageTiles::Place& place, uint32_t i) const {
    return first_[i] + place.offset + (uint64_t{place.tile} * blocks(i) + block(i)) * 16;
  }
  const uint8_t *first_[kRounds], *source_[kRounds];
};

struct NoLoad {
  template <class... Any>
  explicit NoLoad(const Any&...) {}
  uint32_t never_set() const { return 0; }
  void whole(uint32_t, unsigned char*, uint64_t = 0) const {}
  void across(const PageTiles&, unsigned char*) const {}
  void some(const DecodeWalk&, uint32_t, unsigned char*) const {}
};
// Everything of a stage that one warp holds, of one KV head. Compressed caches have no gaps between
// rows or tiles.
template <class Traits>
class StageLoad {
  static constexpr DecodeStage kStage = Traits::kStage;
  static constexpr uint32_t kKeys = kStage.keys, kTiles = kStage.tiles;
  static constexpr bool kPinned = Traits::kPinAddresses;
  static constexpr uint32_t kAnyBytes = 16;  // stands in for a plane that does not exist
  static constexpr uint32_t kTileK = 8 * kStage.k_row, kTileV = kStage.v_tile;
  static constexpr uint32_t kStrideK = Traits::kLevelsK ? kStage.k_row : 0;
  // Rows of a multiple of 128 bytes are swizzled, others padded.
  static constexpr bool is_swizzled(uint32_t bytes) { return bytes % 128 == 0; }
  template <uint32_t kBytes, uint32_t kPitch, uint32_t kTileBytes>
  using Tiles =
      typename Choose<kBytes != 0,
                      RowLoad<kTiles, (kBytes != 0 ? kBytes : kAnyBytes), 1, kPitch, kTileBytes>,
                      NoLoad>::type;
  template <uint32_t kBytes, uint32_t kPitch, uint32_t kRowPitch>
  using KeyRows =
      typename Choose<kBytes != 0,
                      RowLoad<kKeys, (kBytes != 0 ? kBytes : kAnyBytes), 8, kPitch, kStrideK,
                              (is_swizzled(kBytes) ? 4 : 0), 1, Traits::kSlotRotations, kRowPitch>,
                      NoLoad>::type;
  template <uint32_t kBytes, uint32_t kPitch, uint32_t kRowPitch>
  using Keys = typename Choose<kStage.k_tiles, Tiles<kBytes, kPitch, kTileK>,
                               KeyRows<kBytes, kPitch, kRowPitch>>::type;
  template <uint32_t kBytes, uint32_t kPitch, uint32_t kRowPitch>
  using Values = typename Choose<Traits::kLevelsV, Tiles<kBytes, kPitch, kTileV>,
                                 RowLoad<kKeys, (Traits::kLevelsV ? kAnyBytes : kBytes), 8, kPitch,
                                         0, (is_swizzled(kBytes) ? 1 : 0), 7, 0, kRowPitch>>::type;

 public:
  // `slice`: which of the warps that share keys this is.
  StageLoad(const abi::AttentionParams& p, const Args& args, uint32_t kv_head, uint32_t slice)
      : k_(begin(args.at[arg_k_codes], kv_head * p.k.codes_head_stride, kStage.k[0], slice),
           stride(p.k.codes_tile_stride), kPinned),
        k2_(begin(args.at[arg_k_codes], kv_head * p.k.codes_head_stride, kStage.k[1], slice),
            stride(p.k.codes_tile_stride), kPinned),
        v_(begin(args.at[arg_v_codes], kv_head * p.v.codes_head_stride, kStage.v[0], slice),
           stride(p.v.codes_tile_stride), kPinned),
        v2_(begin(args.at[arg_v_codes], kv_head * p.v.codes_head_stride, kStage.v[1], slice),
            stride(p.v.codes_tile_stride), kPinned),
        scales_(begin(args.at[arg_k_scales], kv_head * p.k.scales_head_stride, {}, 0),
                begin(args.at[arg_v_scales], kv_head * p.v.scales_head_stride, {}, 0)) {}

  uint32_t never_set() const {
    return k_.never_set() | k2_.never_set() | v_.never_set() | v2_.never_set() |
           scales_.never_set();
  }

  // Issues the loads of a stage, if the walk has it. Slots without a key become zeros: a stored
  // value could be NaN.
  void start(const DecodeWalk& walk, uint32_t stage, unsigned char* to) const {
    const uint32_t tile = stage * kTiles;
    if (walk.whole(stage * kKeys)) {
      const uint32_t first = walk.tile(tile);
      each(to, [first](const auto& load, unsigned char* at) { load.whole(first, at); });
    } else if (tile < walk.tiles) {
      each(to, [&](const auto& load, unsigned char* at) { load.some(walk, tile, at); });
    }
    copy_commit();
  }

  // Loads a stage from pages; kOnePage: it lies in one page. Slots without a key are read as they
  // are, their scores are masked, but 16-bit values become zeros: they could be NaN. `whole`: there
  // is no such slot; see RowLoad::some_of.
  template <bool kOnePage>
  void start(const PageTiles& pages, bool whole, uint32_t first_key, uint32_t last_key,
             uint32_t first, unsigned char* to) const {
    if constexpr (kOnePage) {
      const PageTiles::Place at = pages.of(0);
      each(to, whole, [&](const auto& load, unsigned char* target) {
        load.whole(at.tile, target, at.offset);
      });
    } else {
      each(to, whole, [&](const auto& load, unsigned char* target) { load.across(pages, target); });
    }
    if constexpr (!Traits::kLevelsV) {
      if (!whole) v_.some_of(pages, first_key, last_key, first, to + kStage.v[0].offset);
    }
    copy_commit();
  }

 private:
  static const uint8_t* begin(uint64_t array, uint64_t offset, const DecodePlane& plane,
                              uint32_t slice) {
    return pointer<const uint8_t>(array) + offset + plane.source_offset + slice * plane.bytes;
  }
  static uint32_t stride(uint64_t bytes) { return static_cast<uint32_t>(bytes); }
  template <class Do>
  void each(unsigned char* to, const Do& run) const {
    each(to, true, run);
  }
  template <class Do>
  void each(unsigned char* to, bool values, const Do& run) const {
    run(k_, to + kStage.k[0].offset);
    run(k2_, to + kStage.k[1].offset);
    run(scales_, to + kStage.k_scales);
    if (values) run(v_, to + kStage.v[0].offset);
    run(v2_, to + kStage.v[1].offset);
  }

  Keys<kStage.k[0].bytes, kStage.k[0].tile_pitch, kStage.k[0].row_pitch> k_;
  Keys<kStage.k[1].bytes, kStage.k[1].tile_pitch, kStage.k[1].row_pitch> k2_;
  Values<kStage.v[0].bytes, kStage.v[0].tile_pitch, kStage.v[0].row_pitch> v_;
  Tiles<kStage.v[1].bytes, kStage.v[1].tile_pitch, kTileV> v2_;
  typename Choose<Traits::kLevelsK || Traits::kLevelsV,
                  ScaleLoad<kTiles, (Traits::kLevelsK ? Traits::kBlocksK : 0),
                            (Traits::kLevelsV ? Traits::kBlocksV : 0)>,
                  NoLoad>::type scales_;
};

// Waits until the oldest of the stages in flight is there, for all lanes.
template <uint32_t kStages>
inline void wait_for_stage() {
  copy_wait<kStages - 2>();
  __syncwarp();
}

}  // namespace gyre::cuda
