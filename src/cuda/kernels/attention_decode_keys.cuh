#pragma once
// Decode attention: levels of keys to scores. Keys are the rows of a product, 16 at a time; queries
// its columns, four at a time, each as two bytes in neighbouring ones, so that one lane gets both
// sums. A dot product does not care in which order coordinates come: each lane reads its share of a
// key in one piece, and the queries are arranged to match.
#include "attention_decode_plan.cuh"
#include "codec.cuh"
#include "softmax.cuh"

namespace gyre::cuda {

// What one lane unpacks at a time: two words of A, four codes each. Levels of tq4 are the
// sum of two parts.
template <uint32_t kFormat>
constexpr uint32_t kLevelParts = kFormat == abi::kTq4 ? 2 : 1;

template <uint32_t kFormat>
struct Unpacked {
  uint32_t part[kLevelParts<kFormat>][2];
};

// Levels by small tables.
struct Table {
  uint32_t bytes[4];
};

// Eight nibbles, sign above magnitude. A selector with its top bit set spreads a byte's sign: the
// first table holds |x| + 1, the second -|x|, so that a plus selects |x| + 1 and -1, a minus 0 and
// -|x|.
template <uint32_t kFormat>
constexpr Table make_table() {
  Table table = {};
  constexpr uint32_t kOne = kFormat == abi::kTq4 ? 0x01010101u : 0;
  if constexpr (abi::kv_is_native(kFormat) && abi::kv_bits(kFormat) <= 4) {
    table.bytes[0] = level_bytes(kFormat, 0) + kOne;
    table.bytes[1] = level_bytes(kFormat, 4) + kOne;
    table.bytes[2] = level_bytes(kFormat, 8);
    table.bytes[3] = level_bytes(kFormat, 12);
  }
  return table;
}

// Every second word from shared memory, where one thread has put it: the compiler would copy the
// constant wherever it is used. The others are part of instructions.
template <uint32_t kFormat>
inline Table load_table(const Table& shared) {
  Table table = make_table<kFormat>();
  table.bytes[0] = shared.bytes[0];
  table.bytes[2] = shared.bytes[2];
  return table;
}

inline Unpacked<abi::kTq4> unpack_nibbles(const Table& table, uint32_t w) {
  const uint32_t x = w ^ 0x88888888u;
  const uint32_t(&t)[4] = table.bytes;
  return {{{permute(t[0], t[1], w), permute(t[0], t[1], upper_half(w))},
           {permute(t[2], t[3], x), permute(t[2], t[3], upper_half(x))}}};
}

// Selectors in nibbles, up to three bits each, to the levels of a small table.
template <uint32_t kFormat>
inline Unpacked<kFormat> select_levels(const Table& table, uint32_t nibbles) {
  const uint32_t(&t)[4] = table.bytes;
  return {{{permute(t[0], t[1], nibbles), permute(t[0], t[1], upper_half(nibbles))}}};
}

template <uint32_t kWords>
inline void load_words(const unsigned char* from, uint32_t* w) {
  if constexpr (kWords >= 4) {
#pragma unroll
    for (uint32_t i = 0; i < kWords / 4; ++i) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    w[0] = x.x, w[1] = x.y;
  } else if constexpr (kWords == 1) {
    w[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

constexpr uint32_t kPairs = 0x33333333u, kThirds = 0x44444444u;

template <uint32_t kN, uint32_t kFormat>
struct KeyReader {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  static constexpr uint32_t kBytes = kN * kLow / 8;                     // of the first plane
  static constexpr uint32_t kVectors = kBytes <= 64 ? 1 : kBytes / 64;  // reads of a key, by a lane
  static constexpr uint32_t kWords = kBytes <= 64 ? kBytes / 16 : 4;    // of one read
  static constexpr uint32_t kSteps = kN / 32;                           // products
  static constexpr uint32_t kStepsOf = kSteps / kVectors;               // that one read is good for
  static constexpr uint32_t kGroup = abi::kv_group(kLow);

  // Byte of the plane where a lane's word begins.
  static constexpr uint32_t word_at(uint32_t j, uint32_t word) {
    if (kBytes <= 64) return j * (kBytes / 4) + 4 * word;
    return (word / 4 * 4 + j) * 16 + word % 4 * 4;
  }
  // The coordinate that lane j has in this place of eight at this step.
  static constexpr uint32_t coordinate(uint32_t j, uint32_t step, uint32_t place) {
    uint32_t word = step, byte = place % 4, piece = place / 4;
    if (kFormat == abi::kTq8) word = 2 * step + place / 4, piece = 0;
    if (kFormat == abi::kTq4) byte = place / 2, piece = place % 2;
    if (kLow == 2) word = step / 2, byte = place / 2, piece = place % 2 * 2 + step % 2;
    const uint32_t at = word_at(j, word) + byte;
    return at / 16 * kGroup + at % 16 + 16 * piece;
  }

  // The same, as a sum: of where four places begin and of how much further one of them is.
  static constexpr uint32_t further(uint32_t place) {
    return coordinate(0, 0, place) - coordinate(0, 0, 0);
  }
  static constexpr bool adds_up() {
    bool all = true;
    for (uint32_t i = 0; i < 4 * kSteps * 8; ++i) {
      const uint32_t j = i % 4, place = i / 4 % 8, step = i / 32;
      all = all &&
            coordinate(j, step, place) == coordinate(j, step, place / 4 * 4) + further(place % 4);
    }
    return all;
  }

  // Byte of the second plane that belongs to one of the first, and by how much its codes lie
  // further up.
  static constexpr uint32_t kHighGroup = kHigh == 0 ? 1 : abi::kv_group(kHigh);
  static constexpr uint32_t high_at(uint32_t at) {
    return at / 16 * kGroup / kHighGroup * 16 + at % 16;
  }
  static uint32_t high_shift(uint32_t j) {
    return word_at(j, 0) / 16 * kGroup % kHighGroup / 16 * kHigh;
  }

  // What lane j of key `row` reads of a plane begins here; of further reads in another one's
  // distance from the first, with 64 bytes more or less in every second row: see RowCopy.
  static uint32_t place(const DecodePlane (&planes)[2], uint32_t plane, uint32_t row, uint32_t j) {
    const DecodePlane& p = planes[plane];
    const uint32_t at = word_at(j, 0), in_row = plane == 0 ? at : high_at(at);
    return p.at + row / 8 * p.tile_pitch + row % 8 * p.bytes + in_row +
           (p.bytes >= 128 ? row % 2 * 64 : 0);
  }
  static void load(const unsigned char* first, uint32_t swap, uint32_t bytes, uint32_t distance,
                   uint32_t (&w)[kWords]) {
    load_words<kWords>(first + distance - (bytes >= 128 && distance / 64 % 2 == 1 ? 2 * swap : 0),
                       w);
  }

  struct Words {
    uint32_t low[kWords], high[kHigh != 0 ? kWords : 1];
  };

  static Words read(const unsigned char* low, const unsigned char* high,
                    const DecodePlane (&planes)[2], uint32_t vector) {
    Words w = {};
    const uint32_t lane = threadIdx.x % kWarp, swap = lane / 4 % 2 * 64, j = lane % 4;
    const uint32_t distance = word_at(0, vector * 4);
    load(low, swap, planes[0].bytes, distance, w.low);
    if constexpr (kHigh != 0) {
      load(high, swap, planes[1].bytes, high_at(distance), w.high);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) w.high[i] >>= high_shift(j);
    }
    return w;
  }

  // Codes of product `step` of those that a read is good for.
  static Unpacked<kFormat> levels(const Table& table, const Words& w, uint32_t step) {
    if constexpr (kFormat == abi::kTq8) {
      return {{{w.low[2 * step], w.low[2 * step + 1]}}};
    } else if constexpr (kFormat == abi::kTq4) {
      return unpack_nibbles(table, w.low[step]);
    } else if constexpr (kLow == 4) {
      constexpr uint32_t kMask = ((1u << kHigh) - 1) * 0x01010101u;
      const uint32_t x = w.low[step], h = w.high[step];
      const uint32_t first = (x & 0x0F0F0F0Fu) | (h & kMask) << 4;
      const uint32_t second = (x >> 4 & 0x0F0F0F0Fu) | (h >> kHigh & kMask) << 4;
      return {{{levels_of_bytes<kFormat, false>(first), levels_of_bytes<kFormat, false>(second)}}};
    } else {
      const uint32_t pairs = w.low[step / 2] >> (step % 2 * 2) & kPairs;
      if constexpr (kFormat == abi::kTq2) return select_levels<kFormat>(table, pairs);
      // Bits 0 and 2 of a byte, or 1 and 3, to bits 2 and 6: what else the product holds is masked.
      const uint32_t thirds = step % 2 == 0 ? (w.high[step / 2] & 0x05050505u) * 20u & kThirds
                                            : (w.high[step / 2] & 0x0A0A0A0Au) * 10u & kThirds;
      return select_levels<kFormat>(table, pairs | thirds);
    }
  }
};

// Of a lane's row: what its scores are multiplied with, in two steps of which the first is a power
// of two.
struct ScoreFactors {
  float first, second;
};

// Probabilities are relative to a number that follows the largest logit only when that is far
// beyond it. It begins with the lowest: -inf less -inf would be NaN.
constexpr float kFarBeyond = 8;  // in base 2
constexpr float kLowest = -3.402823466e38f;

// Where a lane's parts of a stage lie; found once.
struct LanePlaces {
  uint32_t k[2], v[2];  // in the first and second plane
  uint32_t scales;      // from the first of K or V
};

// Of a chunk's keys, scales or values lie in tiles of eight. A lane has two or four neighbouring
// ones, 2 g or 4 g and on, in the order in which values are multiplied; their scales lie in one or
// two words of the tile's.
template <class Shape>
inline uint32_t scales_place() {
  constexpr uint32_t kLanes = 8 / Shape::kTogether;  // to a tile
  const uint32_t g = threadIdx.x % kWarp / 4;
  const uint32_t in_tile =
      Shape::kTogether == 2 ? g % 4 * 4 : (Shape::kTurnedV ? g % 2 * 4 : g % 2 * 8);
  return g / kLanes * Shape::kBlocks * 16 + in_tile;
}

// Of two scales in a word. Products move the bits, see upper_half; the other scale's lowest bit
// comes to be the sign.
inline float scale_in(uint32_t two, uint32_t half) {
  return half == 0 ? fabsf(__uint_as_float(two * 0x8000u))
                   : __uint_as_float(upper_half(two) * 0x8000u);
}

template <class Shape>
inline void load_scales(const unsigned char* mine, uint32_t block, float (&s)[Shape::kLaneKeys]) {
#pragma unroll
  for (uint32_t i = 0; i < Shape::kLaneKeys; i += Shape::kTogether) {
    const unsigned char* const from =
        mine + (i / Shape::kTogether * 4 * Shape::kBlocks + block) * 16;
    if constexpr (Shape::kTogether == 2) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(from);
      s[i] = scale_in(two, 0), s[i + 1] = scale_in(two, 1);
    } else if constexpr (Shape::kTurnedV) {  // 0 4 1 5, 2 6 3 7
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

// Columns of all products: in registers where there are few, else read each time. kSteps are the
// warp's of kAllSteps.
template <uint32_t kFours, uint32_t kSteps, uint32_t kAllSteps>
class QueryColumns {
  static constexpr bool kKept = kFours * kSteps <= 12;

 public:
  QueryColumns(const uint2* shared, uint32_t part)
      : shared_(shared + part * kSteps * kWarp + threadIdx.x % kWarp) {
    if constexpr (kKept) {
#pragma unroll
      for (uint32_t i = 0; i < kFours * kSteps; ++i) {
        const uint2 x = shared_[place(i / kSteps, i % kSteps)];
        kept_[i][0] = x.x, kept_[i][1] = x.y;
      }
    }
  }
  void get(uint32_t four, uint32_t step, uint32_t (&b)[2]) const {
    if constexpr (kKept) {
      b[0] = kept_[four * kSteps + step][0], b[1] = kept_[four * kSteps + step][1];
    } else {
      const uint2 x = shared_[place(four, step)];
      b[0] = x.x, b[1] = x.y;
    }
  }

 private:
  static constexpr uint32_t place(uint32_t four, uint32_t step) {
    return (four * kAllSteps + step) * kWarp;
  }
  const uint2* shared_;
  uint32_t kept_[kKept ? kFours * kSteps : 1][2];
};

// x[four][i]: the score of row 4 four + j for key i of the lane's, as far as the warp's coordinates
// go, without the key's scale.
template <class Shape, uint32_t kFours, class Queries>
inline void score_levels(const Table& table, const Queries& q, const unsigned char* stage,
                         const LanePlaces& places, const ScoreFactors (&factors)[kFours],
                         float (&x)[kFours][Shape::kLaneKeys]) {
  using Reader = KeyReader<Shape::kOwn, Shape::kK>;
  constexpr uint32_t kEach = Shape::kLaneKeys;
  constexpr const DecodePlane(&kPlanes)[2] = Shape::kShape.k;
  const unsigned char *const low = stage + places.k[0], *const high = stage + places.k[1];
  int32_t c[kFours][kEach / 2][4] = {};
#pragma unroll
  for (uint32_t vector = 0; vector < Reader::kVectors; ++vector) {
#pragma unroll
    for (uint32_t two = 0; two < kEach / 2; ++two) {
      typename Reader::Words w[2];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
        w[i] = Reader::read(low + Shape::key_distance(kPlanes[0], 2 * two + i),
                            high + Shape::key_distance(kPlanes[1], 2 * two + i), kPlanes, vector);
#pragma unroll
      for (uint32_t step = 0; step < Reader::kStepsOf; ++step) {
        const Unpacked<Shape::kK> first = Reader::levels(table, w[0], step);
        const Unpacked<Shape::kK> second = Reader::levels(table, w[1], step);
#pragma unroll
        for (uint32_t four = 0; four < kFours; ++four) {
          uint32_t b[2];
          q.get(four, vector * Reader::kStepsOf + step, b);
#pragma unroll
          for (uint32_t part = 0; part < kLevelParts<Shape::kK>; ++part) {
            const uint32_t a[4] = {first.part[part][0], second.part[part][0], first.part[part][1],
                                   second.part[part][1]};
            mma_s8(c[four][two], a, b[0], b[1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kFours * kEach; ++i) {
    const uint32_t four = i / kEach, key = i % kEach;
    const int32_t(&sums)[4] = c[four][key / 2];
    // Below 2^30: 256 coordinates, 7 bits of level, 14 of the query.
    const int32_t sum = sums[key % 2 * 2] * 256 + sums[key % 2 * 2 + 1];
    x[four][key] = static_cast<float>(sum) * factors[four].first;
  }
}

// Scores of coordinates with one scale, times that.
template <class Shape, uint32_t kFours>
inline void scale_scores(const unsigned char* stage, const LanePlaces& places, uint32_t block,
                         const ScoreFactors (&factors)[kFours],
                         float (&x)[kFours][Shape::kLaneKeys]) {
  float scales[Shape::kLaneKeys];
  load_scales<Shape>(stage + Shape::kShape.k_scales + places.scales, block, scales);
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
#pragma unroll
    for (uint32_t i = 0; i < Shape::kLaneKeys; ++i) x[four][i] *= scales[i] * factors[four].second;
  }
}

// A rotated query of integers becomes bytes: a row's two columns of all products, by a warp.
// `row` is null where there is no such row.
template <uint32_t kK, uint32_t kN>
inline void put_columns(const float* row, uint32_t r, uint2* to) {
  constexpr uint32_t kOwn = decode_own(kN);
  using Reader = KeyReader<kOwn, kK>;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t i = lane; i < kN / 4; i += kWarp) {
    const uint32_t half = i % 2, j = i / 2 % 4, step = i / 8;
    uint32_t upper = 0, lower = 0;
    if (row != nullptr) {
      static_assert(Reader::adds_up());
      const uint32_t part = step / Reader::kSteps;
      const float* const first =
          row + part * kOwn + Reader::coordinate(j, step % Reader::kSteps, 4 * half);
      uint32_t x[4], y[4];
#pragma unroll
      for (uint32_t place = 0; place < 4; ++place) {
        x[place] = static_cast<uint32_t>(__float2int_rn(first[Reader::further(place)]));
        y[place] = x[place] + 128;  // rounded, as the lower byte has a sign
      }
      upper = permute(permute(y[0], y[1], 0x51), permute(y[2], y[3], 0x51), 0x5410);
      lower = permute(permute(x[0], x[1], 0x40), permute(x[2], x[3], 0x40), 0x5410);
    }
    auto* const words =
        reinterpret_cast<uint32_t*>(to + (r / 4 * (kN / 32) + step) * kWarp + r % 4 * 8 + j);
    words[half] = upper, words[8 + half] = lower;
  }
}

}  // namespace gyre::cuda
