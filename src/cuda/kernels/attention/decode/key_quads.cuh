#pragma once
// Decode attention: where the coordinates of K lie in tiles as they are stored, for head dims whose
// rows are no whole groups of 16 bytes. A lane unpacks quads, four neighbouring coordinates that
// lie in one word of the first plane; where they lie may differ from lane to lane. Every lane has
// dim / 16 quads, two of them to a step of the MMA. A step may hold coordinates of several scale
// blocks: it is multiplied once for each, with a query that is 0 elsewhere.
#include "abi/kv_codec.h"
#include "cuda/kernels/attention/common/formats.cuh"

namespace gyre::cuda {

// Scale blocks of a head dim up to 256: powers of two, largest first.
struct ScaleBlock {
  uint32_t begin, size;

  constexpr bool has(uint32_t coordinate) const {
    return coordinate >= begin && coordinate < begin + size;
  }
};
constexpr ScaleBlock scale_block(uint32_t dim, uint32_t index) {
  uint32_t begin = 0;
  for (uint32_t size = abi::kKvScaleBlock; size >= 16; size /= 2) {
    if ((dim & size) == 0) continue;
    if (index == 0) return {begin, size};
    begin += size, --index;
  }
  return {begin, 0};
}
constexpr uint32_t scale_block_of(uint32_t dim, uint32_t coordinate) {
  uint32_t index = 0;
  while (!scale_block(dim, index).has(coordinate)) ++index;
  return index;
}

// Where quads of lanes j = 0 to 3 are.
template <uint32_t kDim, uint32_t kFormat>
struct KeyQuads {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  static constexpr uint32_t kCount = kDim / 16, kRow = kDim * (kLow + kHigh) / 8;
  static constexpr uint32_t kSteps = (kCount + 1) / 2, kBlocks = count_scale_blocks(kDim);
  static constexpr uint32_t kHighAt = kDim * kLow / 8;  // where the second plane begins
  // A PRMT selects levels by nibbles: the second quad of a step lies 4 bits above the first.
  static constexpr bool kNibbles = abi::kv_has_magnitudes(kFormat);
  // A second plane of one bit whose last group has no whole words: a quad may lie in two.
  static constexpr bool kRuns = kHigh == 1 && kDim % 32 != 0;
  // Coordinates that lanes share evenly.
  static constexpr uint32_t kUnit = kRuns ? 128 : 64, kUnitQuads = kUnit / 16;
  static constexpr uint32_t unit_size(uint32_t unit) {
    return kDim - unit * kUnit < kUnit ? kDim - unit * kUnit : kUnit;
  }

  // The first coordinate. A lane takes whole words of the first plane, or where it has too few of
  // them, or with runs, the same quarter of all.
  static constexpr uint32_t coordinate(uint32_t j, uint32_t quad) {
    const uint32_t unit = quad / kUnitQuads, i = quad % kUnitQuads, begin = unit * kUnit;
    const uint32_t size = unit_size(unit);
    if (!kRuns && kLow == 4) {
      if (kHigh == 0 && size == kUnit)
        return begin + j / 2 * 32 + j % 2 * 8 + i / 2 * 4 + i % 2 * 16;
      return begin + i / 2 * 32 + 4 * j + (i / 2 < size / 32 ? i % 2 * 16 : 0);
    }
    if (!kRuns && kLow == 2 && size == kUnit) return begin + 4 * j + 16 * (i % 2 * 2 + i / 2);
    return begin + j * (size / 4) + 4 * i;
  }

  // The word of a plane that has the quad, and how far right it is rotated to its place.
  struct Place {
    uint32_t byte, rotation;
  };
  static constexpr Place place(uint32_t plane, uint32_t j, uint32_t quad) {
    const uint32_t bits = plane == 0 ? kLow : kHigh, group = abi::kv_group(bits);
    const uint32_t at = coordinate(j, quad), begin = at / group * group;
    const uint32_t bytes = (kDim - begin < group ? kDim - begin : group) * bits / 8;
    const uint32_t shift = (at - begin) / bytes * bits;
    const uint32_t to = kNibbles ? plane * 2 + quad % 2 * 4 : plane * 4;
    return {plane * kHighAt + begin * bits / 8 + (at - begin) % bytes, (shift - to) % 32};
  }

  // Whether one of the lanes has coordinates of the block in the step.
  static constexpr bool has_block(uint32_t step, uint32_t block) {
    bool any = false;
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t quad = 2 * step + i / 4;
      any = any || (quad < kCount && scale_block(kDim, block).has(coordinate(i % 4, quad)));
    }
    return any;
  }
};

// What follows from KeyQuads for a plane, as tables of constants: what differs from lane to lane is
// computed once and as seldom as possible.
template <uint32_t kDim, uint32_t kFormat>
struct KeyPlaneTables {
  using Quads = KeyQuads<kDim, kFormat>;
  static constexpr uint32_t kCount = Quads::kCount;

  uint32_t loads;             // words that a lane loads
  uint32_t load[kCount];      // the one that has the quad
  uint32_t width[kCount];     // of load i: words loaded together; 0: with an earlier one
  uint32_t address[kCount];   // of load i: a quad whose place it is a constant distance from
  uint32_t distance[kCount];  // that distance
  uint32_t rotation[kCount];  // of quad i: the first that is rotated alike
  bool fixed[kCount];         // whether it is rotated alike in all lanes
  uint32_t amount[kCount];    // if so, how far
  bool pair[Quads::kSteps];   // quads of the step lie in one word and are rotated alike

  static constexpr KeyPlaneTables make(uint32_t plane) {
    KeyPlaneTables t = {};
    uint32_t quad_of[kCount] = {};
    for (uint32_t i = 0; i < kCount; ++i) {
      uint32_t same = 0;
      while (same < t.loads && apart(plane, quad_of[same], i) != 0) ++same;
      t.load[i] = same;
      if (same == t.loads) quad_of[t.loads++] = i;
      while (!rotate_alike(plane, t.rotation[i], i)) ++t.rotation[i];
      t.fixed[i] = true;
      t.amount[i] = Quads::place(plane, 0, i).rotation;
      for (uint32_t j = 0; j < 4; ++j)
        t.fixed[i] = t.fixed[i] && Quads::place(plane, j, i).rotation == t.amount[i];
    }
    for (uint32_t i = 0; i < t.loads; ++i) {
      while (apart(plane, t.address[i], quad_of[i]) == kVaries) ++t.address[i];
      t.distance[i] = apart(plane, t.address[i], quad_of[i]);
    }
    for (uint32_t i = 0; i < t.loads; i += t.width[i]) t.width[i] = width_at(plane, t, quad_of, i);
    for (uint32_t step = 0; step < Quads::kSteps; ++step) {
      const uint32_t a = 2 * step, b = a + 1;
      t.pair[step] = b == kCount || (t.load[a] == t.load[b] && t.rotation[a] == t.rotation[b]);
    }
    return t;
  }

 private:
  // Bytes from quad a to quad b, if that is the same in all lanes.
  static constexpr uint32_t kVaries = 1u << 31;
  static constexpr uint32_t apart(uint32_t plane, uint32_t a, uint32_t b) {
    const auto of = [&](uint32_t j) {
      return Quads::place(plane, j, b).byte - Quads::place(plane, j, a).byte;
    };
    return of(1) == of(0) && of(2) == of(0) && of(3) == of(0) ? of(0) : kVaries;
  }
  static constexpr bool rotate_alike(uint32_t plane, uint32_t a, uint32_t b) {
    bool same = true;
    for (uint32_t j = 0; j < 4; ++j)
      same = same && Quads::place(plane, j, a).rotation == Quads::place(plane, j, b).rotation;
    return same;
  }
  static constexpr uint32_t width_at(uint32_t plane, const KeyPlaneTables& t,
                                     const uint32_t (&quad_of)[kCount], uint32_t i) {
    for (uint32_t width = 4; width > 1; width /= 2) {
      bool together = i + width <= t.loads && Quads::kRow % (4 * width) == 0;
      for (uint32_t k = 0; together && k < 4 * width; ++k) {
        const uint32_t first = Quads::place(plane, k % 4, quad_of[i]).byte;
        together = first % (4 * width) == 0 &&
                   Quads::place(plane, k % 4, quad_of[i + k / 4]).byte == first + 4 * (k / 4);
      }
      if (together) return width;
    }
    return 1;
  }
};

// Which scale blocks a step has coordinates of.
template <uint32_t kDim, uint32_t kFormat>
struct KeySlots {
  using Quads = KeyQuads<kDim, kFormat>;
  bool used[Quads::kSteps][Quads::kBlocks];

  static constexpr KeySlots make() {
    KeySlots slots = {};
    for (uint32_t i = 0; i < Quads::kSteps * Quads::kBlocks; ++i)
      slots.used[i / Quads::kBlocks][i % Quads::kBlocks] =
          Quads::has_block(i / Quads::kBlocks, i % Quads::kBlocks);
    return slots;
  }
};

}  // namespace gyre::cuda
