#pragma once
// Decode attention: where a lane finds its keys, values and scales in a stage, and in which order
// coordinates become operands. A dot product does not depend on their order: each lane reads its
// share of a key in wide loads, and the queries are arranged to match.
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/attention/decode/key_quads.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

// Levels of K: kDim coordinates of a key, by lanes j = 0 to 3. An MMA takes 32 coordinates, eight
// per lane: one step.
template <uint32_t kDim, uint32_t kFormat, bool kManyRows>
struct KeyReader {
  using Form = LevelForm<kFormat, kManyRows>;
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  static constexpr uint32_t kBytes = kDim * kLow / 8;                   // of the first plane
  static constexpr uint32_t kVectors = kBytes <= 64 ? 1 : kBytes / 64;  // loads per key and lane
  static constexpr uint32_t kWords = kBytes <= 64 ? kBytes / 16 : 4;    // of one load
  static constexpr uint32_t kSteps = kDim / 32;
  static constexpr uint32_t kStepsPerVector = kSteps / kVectors;
  static constexpr uint32_t kGroup = abi::kv_group(kLow);

  // Byte of the plane where a lane's word begins.
  static constexpr uint32_t word_at(uint32_t j, uint32_t word) {
    if (kBytes <= 64) return j * (kBytes / 4) + 4 * word;
    return (word / 4 * 4 + j) * 16 + word % 4 * 4;
  }
  // The coordinate that lane j has in operand place 0 to 7 of a step.
  static constexpr uint32_t coordinate(uint32_t j, uint32_t step, uint32_t place) {
    const KeyPlace of = key_place<kFormat>(step, place);
    const uint32_t at = word_at(j, of.word) + of.byte;
    return at / 16 * kGroup + at % 16 + 16 * of.part;
  }

  // Within four places, a coordinate is that of the first plus a constant.
  static constexpr uint32_t place_distance(uint32_t place) {
    return coordinate(0, 0, place) - coordinate(0, 0, 0);
  }
  static constexpr bool distances_hold() {
    bool all = true;
    for (uint32_t i = 0; i < 4 * kSteps * 8; ++i) {
      const uint32_t j = i % 4, place = i / 4 % 8, step = i / 32;
      all = all && coordinate(j, step, place) ==
                       coordinate(j, step, place / 4 * 4) + place_distance(place % 4);
    }
    return all;
  }

  // Byte of the second plane that goes with one of the first, and how far up in it the codes lie.
  static constexpr uint32_t kHighGroup = kHigh == 0 ? 1 : abi::kv_group(kHigh);
  static constexpr uint32_t high_at(uint32_t at) {
    return at / 16 * kGroup / kHighGroup * 16 + at % 16;
  }
  static uint32_t high_shift(uint32_t j) {
    return word_at(j, 0) / 16 * kGroup % kHighGroup / 16 * kHigh;
  }

  // Where lane j's first load of key `row` begins in a plane. RowLoad swizzles rows of 128 bytes or
  // more: odd rows have their 64-byte halves exchanged.
  static uint32_t place(const DecodePlane (&planes)[2], uint32_t plane, uint32_t row, uint32_t j) {
    const DecodePlane& p = planes[plane];
    const uint32_t at = word_at(j, 0), in_row = plane == 0 ? at : high_at(at);
    return p.offset + row / 8 * p.tile_pitch + row % 8 * p.bytes + in_row +
           (p.bytes >= 128 ? row % 2 * 64 : 0);
  }
  static void load(const unsigned char* first, uint32_t swizzle, uint32_t bytes, uint32_t distance,
                   uint32_t (&w)[kWords]) {
    const bool exchanged = bytes >= 128 && distance / 64 % 2 == 1;
    load_shared_words<kWords>(first + distance - (exchanged ? 2 * swizzle : 0), w);
  }

  struct Words {
    uint32_t low[kWords], high[kHigh != 0 ? kWords : 1];
  };

  static Words read(const unsigned char* low, const unsigned char* high,
                    const DecodePlane (&planes)[2], uint32_t vector) {
    Words w = {};
    const uint32_t lane = threadIdx.x % kWarp, swizzle = lane / 4 % 2 * 64, j = lane % 4;
    const uint32_t distance = word_at(0, vector * 4);
    load(low, swizzle, planes[0].bytes, distance, w.low);
    if constexpr (kHigh != 0) {
      load(high, swizzle, planes[1].bytes, high_at(distance), w.high);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) w.high[i] >>= high_shift(j);
    }
    return w;
  }

  // Operands of one of a vector's steps.
  static auto unpack(const LevelTable& table, const Words& w, uint32_t step) {
    const uint32_t word = key_word<kFormat>(step);
    return unpack_key<kFormat, kManyRows>(table, w.low[word],
                                          w.low[kFormat == abi::kTq8 ? word + 1 : word],
                                          w.high[kHigh != 0 ? word : 0], step);
  }
};

// Keys of tiles as they are stored, by quads.
template <uint32_t kDim, uint32_t kFormat, bool kManyRows>
struct TileKeyReader {
  using Form = LevelForm<kFormat, kManyRows>;
  using Quads = KeyQuads<kDim, kFormat>;
  using Tables = KeyPlaneTables<kDim, kFormat>;
  static constexpr uint32_t kQuads = Quads::kCount, kSteps = Quads::kSteps;
  static constexpr uint32_t kBlocks = Quads::kBlocks;
  static constexpr bool kNibbles = Quads::kNibbles, kRuns = Quads::kRuns;
  // Planes that are read quad by quad; tables of the second one where there is one.
  static constexpr uint32_t kPlanes = Quads::kHigh != 0 && !kRuns ? 2 : 1;
  static constexpr Tables kTables[2] = {Tables::make(0), Tables::make(kPlanes - 1)};
  static constexpr KeySlots<kDim, kFormat> kSlots = KeySlots<kDim, kFormat>::make();
  // Words of a plane of runs: four of each whole unit, and those of the last.
  static constexpr uint32_t kUnits = (kDim + Quads::kUnit - 1) / Quads::kUnit;
  static constexpr uint32_t kRunWords =
      kRuns ? (kUnits - 1) * 4 + (Quads::unit_size(kUnits - 1) / 8 + 3) / 4 : 1;
  // Rows of an odd number of 16 bits: every second one begins in the middle of a word.
  static constexpr bool kHalfWords = Quads::kRow % 4 == 2;
  static_assert(!kHalfWords || kRuns);

  static constexpr uint32_t slot(uint32_t step, uint32_t block) { return step * kBlocks + block; }
  // The coordinate that lane j has in operand place 0 to 7 of a step; kDim: none.
  static constexpr uint32_t coordinate(uint32_t j, uint32_t step, uint32_t place) {
    const uint32_t quad = 2 * step + (kNibbles ? place % 2 : place / 4);
    if (quad >= kQuads) return kDim;
    return Quads::coordinate(j, quad) + (kNibbles ? place / 2 : place % 4);
  }

  // What a lane keeps: where its first key begins in a stage, where the quads of that lie, how they
  // are rotated, and runs, so that their first bits come to kRunPlace.
  static constexpr uint32_t kRunPlace = kNibbles ? 2 : 4;
  uint32_t first, at[kPlanes][kQuads], rotation[kPlanes][kQuads], run_rotation;

  TileKeyReader() = default;
  TileKeyReader(uint32_t first_key, uint32_t j)
      : first(first_key), run_rotation(2 * j - kRunPlace) {
#pragma unroll
    for (uint32_t i = 0; i < kPlanes * kQuads; ++i) {
      const typename Quads::Place place = Quads::place(i / kQuads, j, i % kQuads);
      at[i / kQuads][i % kQuads] = first_key + place.byte;
      rotation[i / kQuads][i % kQuads] = place.rotation;
    }
  }

  struct Words {
    uint32_t of[kPlanes][kQuads], runs[kRunWords];
  };

  // The lane's words of the key `distance` bytes from its first; `half`: it begins in the middle of
  // a word.
  Words read(const unsigned char* stage, uint32_t distance, bool half) const {
    Words w = {};
#pragma unroll
    for (uint32_t plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
      for (uint32_t i = 0; i < kTables[plane].loads; ++i) {
        const unsigned char* const from =
            stage + at[plane][kTables[plane].address[i]] + (distance + kTables[plane].distance[i]);
        uint32_t* const to = w.of[plane] + i;
        if (kTables[plane].width[i] == 4) {
          load_shared_words<4>(from, to);
        } else if (kTables[plane].width[i] == 2) {
          load_shared_words<2>(from, to);
        } else if (kTables[plane].width[i] == 1) {
          *to = word(from, half);
        }
      }
    }
    if constexpr (kRuns) {
#pragma unroll
      for (uint32_t i = 0; i < kRunWords; ++i)
        w.runs[i] = rotate_right(word(stage + first + (distance + Quads::kHighAt + 4 * i), half),
                                 run_rotation);
    }
    return w;
  }

  auto unpack(const LevelTable& table, const Words& w, uint32_t step) const {
    const uint32_t a = 2 * step, b = a + 1 < kQuads ? a + 1 : a;
    if constexpr (kNibbles) {
      uint32_t thirds = 0;
      if constexpr (kRuns) thirds = join_runs(run(w, a), run(w, b));
      if constexpr (kPlanes == 2) thirds = joined(w, 1, step);
      return unpack_key_nibbles<kFormat, kManyRows>(table, joined(w, 0, step), thirds);
    } else {
      return Operands<1>{{{unpack_key_bytes<kFormat>(rotated(w, 0, a), high(w, a)),
                           unpack_key_bytes<kFormat>(rotated(w, 0, b), high(w, b))}}};
    }
  }

 private:
  static uint32_t word(const unsigned char* from, bool half) {
    if (!kHalfWords || !half) return *reinterpret_cast<const uint32_t*>(from);
    return permute(*reinterpret_cast<const uint32_t*>(from - 2),
                   *reinterpret_cast<const uint32_t*>(from + 2), 0x5432);
  }
  // A quad's bits of a plane at their place in each byte; around them are others.
  uint32_t rotated(const Words& w, uint32_t plane, uint32_t quad) const {
    const Tables& t = kTables[plane];
    const uint32_t x = w.of[plane][t.load[quad]];
    if (t.fixed[quad] && t.amount[quad] == 0) return x;
    return rotate_right(x, t.fixed[quad] ? t.amount[quad] : rotation[plane][t.rotation[quad]]);
  }
  // Nibbles of the two quads of a step.
  uint32_t joined(const Words& w, uint32_t plane, uint32_t step) const {
    const uint32_t x = rotated(w, plane, 2 * step);
    if (kTables[plane].pair[step]) return x;
    return (x & 0x0F0F0F0Fu) | (rotated(w, plane, 2 * step + 1) & 0xF0F0F0F0u);
  }
  uint32_t high(const Words& w, uint32_t quad) const {
    if constexpr (kRuns) return run(w, quad).at_place();
    if constexpr (kPlanes == 2) return rotated(w, 1, quad);
    return 0;
  }

  // A quad's bits of a plane of runs, at kRunPlace of each byte or one place above.
  struct RunBits {
    uint32_t word;
    bool above;

    uint32_t at_place() const { return above ? word >> 1 : word; }
  };
  // A lane has two runs of unit / 8 coordinates, in bits 2 j and 2 j + 1 of neighbouring bytes.
  static RunBits run(const Words& w, uint32_t quad) {
    const uint32_t unit = quad / Quads::kUnitQuads, at = quad % Quads::kUnitQuads * 4;
    const uint32_t length = Quads::unit_size(unit) / 8, begin = 4 * unit;
    if (at + 4 <= length) return {w.runs[begin + at / 4], false};
    if (at < length) return {permute(w.runs[begin + at / 4], w.runs[begin] >> 1, 0x5410), false};
    const uint32_t of = begin + (at - length) / 4;
    if ((at - length) % 4 == 0) return {w.runs[of], true};
    return {permute(w.runs[of], w.runs[of + 1], 0x5432), true};
  }
  // Third bits of the nibbles of two quads.
  static uint32_t join_runs(const RunBits& a, const RunBits& b) {
    const bool both_above = a.above && b.above;
    const uint32_t second = b.word << (b.above && !both_above ? 3 : 4);
    const uint32_t x =
        ((both_above ? a.word : a.at_place()) & 0x0F0F0F0Fu) | (second & 0xF0F0F0F0u);
    return both_above ? x >> 1 : x;
  }
};

// Reads V in levels: tile j, from coordinate 4 g on.
template <uint32_t kFormat>
inline uint32_t values_offset(const DecodePlane (&planes)[2], uint32_t plane) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const DecodePlane& p = planes[plane];
  const uint32_t bits = plane == 0 ? abi::kv_low_bits(kFormat) : abi::kv_high_bits(kFormat);
  return p.offset + j * p.tile_pitch + 4 * g * bits;
}

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
