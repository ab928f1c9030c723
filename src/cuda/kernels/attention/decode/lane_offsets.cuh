#pragma once
// Decode attention: where a lane finds its keys, values and scales in a stage.
#include "cuda/kernels/attention/decode/key_tile.cuh"

namespace gyre::cuda {

struct NoKeyTiles {};

// Scales lie in tiles of eight keys. A lane has two or four neighbouring keys, 2 g or 4 g and on,
// in the order of the MMA over V; their scales are one or two words of the tile's.
template <class Traits>
inline uint32_t scales_offset(uint32_t blocks) {
  constexpr uint32_t kLanes = 8 / Traits::kAdjacentKeys;  // per tile
  const uint32_t g = threadIdx.x % kWarp / 4;
  const uint32_t in_tile =
      Traits::kAdjacentKeys == 2 ? g % 4 * 4 : (Traits::kInterleavedV ? g % 2 * 4 : g % 2 * 8);
  return g / kLanes * blocks * 16 + in_tile;
}

// Where a lane's parts of a stage lie; computed once. Scales from the first of K or V on.
template <class Traits>
struct LaneOffsets {
  using Tiles = TileKeyReader<Traits::kKeyDim, Traits::kK, Traits::kManyRows>;
  uint32_t k[2], v[2];  // in the first and second plane
  uint32_t k_scales, v_scales;
  typename Choose<Traits::kStage.k_tiles, Tiles, NoKeyTiles>::type k_tiles;
};

template <class Traits>
inline LaneOffsets<Traits> lane_offsets() {
  LaneOffsets<Traits> at = {};
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const auto pinned = [](uint32_t x) { return Traits::kPinAddresses ? pin(x) : x; };
  if constexpr (Traits::kStage.k_tiles) {
    const DecodePlane& plane = Traits::kStage.k[0];
    const uint32_t token = Traits::first_token(g);
    at.k_tiles = typename LaneOffsets<Traits>::Tiles(
        plane.offset + token / 8 * plane.tile_pitch + token % 8 * plane.row_pitch, j);
  } else if constexpr (Traits::kLevelsK) {
    using Reader = KeyReader<Traits::kKeySlice, Traits::kK, Traits::kManyRows>;
    at.k[0] = pinned(Reader::place(Traits::kStage.k, 0, Traits::first_row(g), j));
    if (Reader::kHigh != 0)
      at.k[1] = pinned(Reader::place(Traits::kStage.k, 1, Traits::first_row(g), j));
  }
  if constexpr (Traits::kLevelsV) {
    at.v[0] = pinned(values_offset<Traits::kV>(Traits::kStage.v, 0));
    if (abi::kv_high_bits(Traits::kV) != 0)
      at.v[1] = pinned(values_offset<Traits::kV>(Traits::kStage.v, 1));
  }
  if constexpr (Traits::kLevelsK) at.k_scales = pinned(scales_offset<Traits>(Traits::kBlocksK));
  if constexpr (Traits::kLevelsV && Traits::kLevelsK && Traits::kBlocksK == Traits::kBlocksV) {
    at.v_scales = at.k_scales;
  } else if constexpr (Traits::kLevelsV) {
    at.v_scales = pinned(scales_offset<Traits>(Traits::kBlocksV));
  }
  return at;
}

// Scales of a lane's keys in one of kBlocks scale blocks.
template <class Traits, uint32_t kBlocks>
inline void load_scales(const unsigned char* scales, uint32_t block,
                        float (&s)[Traits::kLaneKeys]) {
#pragma unroll
  for (uint32_t i = 0; i < Traits::kLaneKeys; i += Traits::kAdjacentKeys) {
    const unsigned char* const from =
        scales + (i / Traits::kAdjacentKeys * 4 * kBlocks + block) * 16;
    if constexpr (Traits::kAdjacentKeys == 2) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(from);
      s[i] = scale_in(two, 0), s[i + 1] = scale_in(two, 1);
    } else if constexpr (Traits::kInterleavedV) {  // 0 4 1 5, 2 6 3 7
      const uint32_t a = *reinterpret_cast<const uint32_t*>(from);
      const uint32_t b = *reinterpret_cast<const uint32_t*>(from + 8);
      s[i] = scale_in(a, 0), s[i + 1] = scale_in(b, 0);
      s[i + 2] = scale_in(a, 1), s[i + 3] = scale_in(b, 1);
    } else {
      const uint2 w = *reinterpret_cast<const uint2*>(from);
      s[i] = scale_in(w.x, 0), s[i + 1] = scale_in(w.x, 1);
      s[i + 2] = scale_in(w.y, 0), s[i + 3] = scale_in(w.y, 1);
    }
  }
}

}  // namespace gyre::cuda
