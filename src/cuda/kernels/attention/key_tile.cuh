#pragma once
// Decode attention: levels of K in tiles as they are stored, for head dims whose rows are no whole
// groups of 16 bytes. A lane unpacks quads, four neighbouring coordinates that lie in one word of
// the first plane; where they lie may differ from lane to lane. Every lane has dim / 16 quads, two
// of them to a step of the MMA. A step may hold coordinates of several scale blocks: it is
// multiplied once for each, with a query that is 0 elsewhere.
#include "cuda/kernels/attention/key_reader.cuh"

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

// Where quads of lanes j = 0 to 3 are. Codes of a quad lie `shift` bits up in the bytes of a word.
template <uint32_t kDim, uint32_t kFormat>
struct KeyQuads {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  static constexpr uint32_t kCount = kDim / 16;
  // Coordinates that lanes share evenly: the groups of the second plane.
  static constexpr uint32_t kUnit = kHigh == 1 ? 128 : 64, kUnitQuads = kUnit / 16;
  static constexpr uint32_t unit_size(uint32_t unit) {
    return kDim - unit * kUnit < kUnit ? kDim - unit * kUnit : kUnit;
  }

  // The first coordinate. Lanes take a quarter of each unit, tq2 and tq4 whole words of whole ones:
  // these need no shift.
  static constexpr uint32_t coordinate(uint32_t j, uint32_t quad) {
    const uint32_t unit = quad / kUnitQuads, i = quad % kUnitQuads, begin = unit * kUnit;
    const uint32_t size = unit_size(unit);
    if (kFormat == abi::kTq4) {
      if (size == kUnit) return begin + j / 2 * 32 + j % 2 * 8 + i / 2 * 4 + i % 2 * 16;
      return i < 2 && size >= 32 ? begin + 4 * j + 16 * i : begin + size / 32 * 32 + 4 * j;
    }
    if (kFormat == abi::kTq2 && size == kUnit) return begin + 4 * j + 16 * (i % 2 * 2 + i / 2);
    return begin + j * (size / 4) + 4 * i;
  }

  struct Place {
    uint32_t byte, shift;
  };
  static constexpr Place place(uint32_t j, uint32_t quad) {
    constexpr uint32_t kGroup = abi::kv_group(kLow);
    const uint32_t at = coordinate(j, quad), begin = at / kGroup * kGroup;
    const uint32_t bytes = (kDim - begin < kGroup ? kDim - begin : kGroup) * kLow / 8;
    return {begin * kLow / 8 + (at - begin) % bytes, (at - begin) / bytes * kLow};
  }

  // Whether two quads are a constant distance apart, or have one shift, in all lanes.
  static constexpr bool same_distance(uint32_t a, uint32_t b) {
    bool same = true;
    for (uint32_t j = 0; j < 4; ++j)
      same = same && place(j, a).byte - place(j, b).byte == place(0, a).byte - place(0, b).byte;
    return same;
  }
  static constexpr bool same_word(uint32_t a, uint32_t b) {
    return same_distance(a, b) && place(0, a).byte == place(0, b).byte;
  }
  static constexpr bool shifts_differ_by(uint32_t a, uint32_t b, uint32_t bits) {
    bool same = true;
    for (uint32_t j = 0; j < 4; ++j) same = same && place(j, a).shift + bits == place(j, b).shift;
    return same;
  }
  static constexpr bool is_shift_fixed(uint32_t quad) {
    bool same = true;
    for (uint32_t j = 0; j < 4; ++j) same = same && place(j, quad).shift == place(0, quad).shift;
    return same;
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

// What follows from KeyQuads, as tables of constants.
template <uint32_t kDim, uint32_t kFormat>
struct KeyQuadTables {
  using Quads = KeyQuads<kDim, kFormat>;
  static constexpr uint32_t kCount = Quads::kCount, kRow = kDim * abi::kv_bits(kFormat) / 8;
  static constexpr uint32_t kSteps = (kCount + 1) / 2, kBlocks = count_scale_blocks(kDim);

  uint32_t loads;             // words that a lane loads
  uint32_t load[kCount];      // the one that has the quad
  uint32_t width[kCount];     // of load i: words loaded together; 0: with an earlier one
  uint32_t address[kCount];   // of load i: a quad whose place it is a constant distance from
  uint32_t distance[kCount];  // that distance
  uint32_t shift[kCount];     // of quad i: the first with the same shift
  bool fixed[kCount];         // whether that is the same in all lanes
  uint32_t bits[kCount];      // if so, what it is
  bool pair[kSteps];          // the step's quads lie in one word, the second 4 bits up
  bool slots[kSteps][kBlocks];

  static constexpr KeyQuadTables make() {
    KeyQuadTables t = {};
    uint32_t quad_of[kCount] = {};
    for (uint32_t i = 0; i < kCount; ++i) {
      uint32_t same = 0;
      while (same < t.loads && !Quads::same_word(quad_of[same], i)) ++same;
      t.load[i] = same;
      if (same == t.loads) quad_of[t.loads++] = i;
      while (!Quads::shifts_differ_by(t.shift[i], i, 0)) ++t.shift[i];
      t.fixed[i] = Quads::is_shift_fixed(i);
      t.bits[i] = Quads::place(0, i).shift;
    }
    for (uint32_t i = 0; i < t.loads; ++i) {
      while (!Quads::same_distance(t.address[i], quad_of[i])) ++t.address[i];
      t.distance[i] = Quads::place(0, quad_of[i]).byte - Quads::place(0, t.address[i]).byte;
    }
    for (uint32_t i = 0; i < t.loads; i += t.width[i]) t.width[i] = width_at(t, quad_of, i);
    for (uint32_t step = 0; step < kSteps; ++step) {
      const uint32_t a = 2 * step, b = a + 1;
      t.pair[step] = b == kCount || (t.load[a] == t.load[b] && Quads::shifts_differ_by(a, b, 4));
      for (uint32_t block = 0; block < kBlocks; ++block)
        t.slots[step][block] = Quads::has_block(step, block);
    }
    return t;
  }

 private:
  static constexpr uint32_t width_at(const KeyQuadTables& t, const uint32_t (&quad_of)[kCount],
                                     uint32_t i) {
    for (uint32_t width = 4; width > 1; width /= 2) {
      bool together = i + width <= t.loads && kRow % (4 * width) == 0;
      for (uint32_t k = 0; together && k < 4 * width; ++k) {
        const uint32_t first = Quads::place(k % 4, quad_of[i]).byte;
        together = first % (4 * width) == 0 &&
                   Quads::place(k % 4, quad_of[i + k / 4]).byte == first + 4 * (k / 4);
      }
      if (together) return width;
    }
    return 1;
  }
};

template <uint32_t kDim, uint32_t kFormat, bool kManyRows>
struct TileKeyReader {
  using Form = LevelForm<kFormat, kManyRows>;
  using Quads = KeyQuads<kDim, kFormat>;
  using Tables = KeyQuadTables<kDim, kFormat>;
  static constexpr Tables kTables = Tables::make();
  static constexpr uint32_t kLow = Quads::kLow, kHigh = Quads::kHigh, kQuads = Quads::kCount;
  static constexpr uint32_t kSteps = Tables::kSteps, kBlocks = Tables::kBlocks;
  static constexpr uint32_t kRow = Tables::kRow, kHighAt = kDim * kLow / 8;
  static constexpr bool kNibbles = abi::kv_has_magnitudes(kFormat);
  // The second plane: bytes of the last unit, words of all.
  static constexpr uint32_t kUnits = (kDim + Quads::kUnit - 1) / Quads::kUnit;
  static constexpr uint32_t kHighWords =
      kHigh == 0 ? 0 : (kUnits - 1) * 4 + (Quads::unit_size(kUnits - 1) * kHigh / 8 + 3) / 4;
  // Rows of an odd number of 16 bits: every second one begins in the middle of a word.
  static constexpr bool kHalfWords = kRow % 4 == 2;

  static constexpr uint32_t slot(uint32_t step, uint32_t block) { return step * kBlocks + block; }
  // The coordinate that lane j has in operand place 0 to 7 of a step; kDim: none.
  static constexpr uint32_t coordinate(uint32_t j, uint32_t step, uint32_t place) {
    const uint32_t quad = 2 * step + (kNibbles ? place % 2 : place / 4);
    if (quad >= kQuads) return kDim;
    return Quads::coordinate(j, quad) + (kNibbles ? place / 2 : place % 4);
  }

  // What a lane keeps: where its first key begins in a stage, from there the places of its quads,
  // shifts of the first plane, and the shift of the second that leaves its bits at kHighPlace.
  static constexpr uint32_t kHighPlace = kNibbles ? 2 : 4;
  uint32_t first, low[kQuads], shift[kQuads], high_shift;

  TileKeyReader() = default;
  TileKeyReader(uint32_t first_key, uint32_t j) : first(first_key), high_shift(2 * j - kHighPlace) {
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      const typename Quads::Place at = Quads::place(j, i);
      low[i] = first_key + at.byte, shift[i] = at.shift;
    }
  }

  struct Words {
    uint32_t low[kQuads], high[kHigh != 0 ? kHighWords : 1];
  };

  // The lane's words of the key `distance` bytes from its first; `half`: it begins in the middle of
  // a word.
  Words read(const unsigned char* stage, uint32_t distance, bool half) const {
    Words w = {};
#pragma unroll
    for (uint32_t i = 0; i < kTables.loads; ++i) {
      const unsigned char* const from =
          stage + low[kTables.address[i]] + (distance + kTables.distance[i]);
      if (kTables.width[i] == 4) {
        load_shared_words<4>(from, w.low + i);
      } else if (kTables.width[i] == 2) {
        load_shared_words<2>(from, w.low + i);
      } else if (kTables.width[i] == 1) {
        w.low[i] = word(from, half);
      }
    }
    if constexpr (kHigh != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kHighWords; ++i)
        w.high[i] =
            rotate_right(word(stage + first + (distance + kHighAt + 4 * i), half), high_shift);
    }
    return w;
  }

  auto unpack(const LevelTable& table, const Words& w, uint32_t step) const {
    const uint32_t a = 2 * step, b = a + 1 < kQuads ? a + 1 : a;
    if constexpr (kNibbles) {
      uint32_t x = shifted(w, a, 0);
      if (!kTables.pair[step]) x = (x & 0x0F0F0F0Fu) | (shifted(w, b, 4) & 0xF0F0F0F0u);
      return unpack_key_nibbles<kFormat, kManyRows>(table, x, thirds(high(w, a), high(w, b)));
    } else {
      return Operands<1>{{{unpack_key_bytes<kFormat>(shifted(w, a, 0), high(w, a).at_place()),
                           unpack_key_bytes<kFormat>(shifted(w, b, 0), high(w, b).at_place())}}};
    }
  }

 private:
  static uint32_t word(const unsigned char* from, bool half) {
    if (!kHalfWords || !half) return *reinterpret_cast<const uint32_t*>(from);
    return permute(*reinterpret_cast<const uint32_t*>(from - 2),
                   *reinterpret_cast<const uint32_t*>(from + 2), 0x5432);
  }
  // A quad's word with its codes `to` bits up in each byte.
  uint32_t shifted(const Words& w, uint32_t quad, uint32_t to) const {
    const uint32_t x = w.low[kTables.load[quad]];
    if (kTables.fixed[quad] && kTables.bits[quad] == to) return x;
    const uint32_t by = kTables.fixed[quad] ? kTables.bits[quad] : shift[kTables.shift[quad]];
    return to == 0 ? x >> by : rotate_right(x, by - to);
  }

  // A quad's bits of the second plane, at kHighPlace of each byte, or one place above. Around them
  // are others.
  struct HighBits {
    uint32_t word;
    bool above;

    uint32_t at_place() const { return above ? word >> 1 : word; }
  };
  // With one bit, a lane has two runs of unit / 8 coordinates, in bits 2 j and 2 j + 1.
  static HighBits high(const Words& w, uint32_t quad) {
    if constexpr (kHigh == 0) return {0, false};
    if constexpr (kHigh == 2) return {w.high[quad], false};
    const uint32_t unit = quad / Quads::kUnitQuads, at = quad % Quads::kUnitQuads * 4;
    const uint32_t run = Quads::unit_size(unit) / 8, begin = 4 * unit;
    if (at + 4 <= run) return {w.high[begin + at / 4], false};
    if (at < run) return {permute(w.high[begin + at / 4], w.high[begin] >> 1, 0x5410), false};
    const uint32_t of = begin + (at - run) / 4;
    if ((at - run) % 4 == 0) return {w.high[of], true};
    return {permute(w.high[of], w.high[of + 1], 0x5432), true};
  }
  // Third bits of the nibbles of two quads.
  static uint32_t thirds(const HighBits& a, const HighBits& b) {
    const bool both = a.above && b.above;
    const uint32_t second = b.word << (b.above && !both ? 3 : 4);
    const uint32_t x = ((both ? a.word : a.at_place()) & 0x0F0F0F0Fu) | (second & 0xF0F0F0F0u);
    return both ? x >> 1 : x;
  }
};

}  // namespace gyre::cuda
