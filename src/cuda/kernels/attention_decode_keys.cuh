#pragma once
// Decode attention: levels of keys to scores. Keys are the rows of a product, 16 at a time; queries
// its columns, four at a time, each as two bytes in neighbouring ones, so that one lane gets both
// sums. A dot product does not care in which order coordinates come: each lane reads its share of a
// key in one piece, and the queries are arranged to match.
#include "attention_decode_plan.cuh"
#include "codec.cuh"
#include "softmax.cuh"

namespace gyre::cuda {

// What goes through a product for a level. Codes of tq5 and tq6 are u of a level 2 u - kBias; what
// is left of it is one number for all keys, or for all coordinates. Of tq4 either u is made, or,
// with fewer instructions but two products, two bytes whose sum is the level: a product takes as
// long as three permutes, so that pays for up to four rows.
template <uint32_t kFormat, bool kMany>
struct LevelForm {
  static constexpr bool kLinear = kFormat == abi::kTq5 || kFormat == abi::kTq6;
  static constexpr uint32_t kParts = kFormat == abi::kTq4 && !kMany ? 2 : 1;
  static constexpr bool kOdd = kLinear || (kFormat == abi::kTq4 && kMany);
  static constexpr uint32_t kStep = kOdd ? 2 : 1;
  static constexpr uint32_t kBias = !kOdd     ? 0
                                    : kLinear ? (1u << abi::kv_bits(kFormat)) - 1
                                              : abi::kTq4Levels[7];
  // Of four neighbouring codes.
  static constexpr uint32_t bytes(uint32_t first) {
    uint32_t x = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      int32_t level = abi::kv_level(kFormat, first + i);
      if (kOdd) level = (level + static_cast<int32_t>(kBias)) / 2;
      if (kParts == 2 && level > 0) ++level;
      x |= (static_cast<uint32_t>(level) & 255u) << (8 * i);
    }
    return x;
  }
  static constexpr bool exact() {
    bool even = true;
    for (uint32_t code = 0; kOdd && code < 1u << abi::kv_bits(kFormat); ++code)
      even = even && (abi::kv_level(kFormat, code) + static_cast<int32_t>(kBias)) % 2 == 0;
    return even;
  }
  static_assert(exact());
};

// What one lane unpacks at a time: two words of A, four codes each.
template <uint32_t kParts>
struct Unpacked {
  uint32_t part[kParts][2];
};

// Levels by small tables; of tq4, codes without a sign, and those with one from the last to the
// first: see unpack_nibbles.
struct Table {
  uint32_t bytes[4];
};
constexpr uint32_t turned_bytes(uint32_t x) {
  return x << 24 | (x & 0xFF00u) << 8 | (x >> 8 & 0xFF00u) | x >> 24;
}
template <uint32_t kFormat, bool kMany>
constexpr Table make_table() {
  Table table = {};
  if constexpr (abi::kv_is_native(kFormat) && abi::kv_bits(kFormat) <= 4) {
    using Form = LevelForm<kFormat, kMany>;
    constexpr uint32_t kCodes = 1u << abi::kv_bits(kFormat), kPlain = kCodes < 8 ? kCodes : 8;
    for (uint32_t i = 0; 4 * i < kPlain; ++i) table.bytes[i] = Form::bytes(4 * i);
    if (kCodes == 16) {
      table.bytes[2] = turned_bytes(Form::bytes(12));
      table.bytes[3] = turned_bytes(Form::bytes(8));
    }
  }
  return table;
}

// Every second word from shared memory, where one thread has put it for even lanes and for odd
// ones: the compiler would copy a constant, or what it knows to be alike in all lanes, wherever it
// is used. The others are part of instructions.
using SharedTable = Table[2];
template <uint32_t kFormat, bool kMany>
inline Table load_table(const SharedTable& shared) {
  Table table = make_table<kFormat, kMany>();
  table.bytes[0] = shared[threadIdx.x % 2].bytes[0];
  table.bytes[2] = shared[threadIdx.x % 2].bytes[2];
  return table;
}

// Eight nibbles, a sign above three bits. A selector with its top bit set spreads the sign of the
// byte instead: the second table is read with all bits turned, hence from its end. In two parts the
// first table holds |x| + 1, the second -|x|, so that a plus selects |x| + 1 and -1, a minus 0 and
// -|x|. In one no byte has a sign, and what is not selected is 0.
template <bool kMany>
inline auto unpack_nibbles(const Table& table, uint32_t w) {
  const uint32_t(&t)[4] = table.bytes;
  const uint32_t a = permute(t[0], t[1], w), b = permute(t[0], t[1], upper_half(w));
  const uint32_t c = permute(t[2], t[3], turned_lower(w));
  const uint32_t d = permute(t[2], t[3], turned_upper(w));
  if constexpr (kMany) {
    return Unpacked<1>{{{a | c, b | d}}};
  } else {
    return Unpacked<2>{{{a, b}, {c, d}}};
  }
}

// Selectors in nibbles, up to three bits each, to the levels of a small table.
inline Unpacked<1> select_levels(const Table& table, uint32_t nibbles) {
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

template <uint32_t kN, uint32_t kFormat, bool kMany>
struct KeyReader {
  using Form = LevelForm<kFormat, kMany>;
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
  static Unpacked<Form::kParts> levels(const Table& table, const Words& w, uint32_t step) {
    if constexpr (kFormat == abi::kTq8) {
      return {{{w.low[2 * step], w.low[2 * step + 1]}}};
    } else if constexpr (kFormat == abi::kTq4) {
      return unpack_nibbles<kMany>(table, w.low[step]);
    } else if constexpr (kLow == 4) {
      constexpr uint32_t kMask = ((1u << kHigh) - 1) * 0x01010101u;
      const uint32_t x = w.low[step], h = w.high[step];
      return {{{(x & 0x0F0F0F0Fu) | (h & kMask) << 4, (x >> 4 & 0x0F0F0F0Fu) | (h >> kHigh & kMask)
                                                                                   << 4}}};
    } else {
      const uint32_t pairs = w.low[step / 2] >> (step % 2 * 2) & kPairs;
      if constexpr (kFormat == abi::kTq2) return select_levels(table, pairs);
      // Bits 0 and 2 of a byte, or 1 and 3, to bits 2 and 6: what else the product holds is masked.
      const uint32_t thirds = step % 2 == 0 ? (w.high[step / 2] & 0x05050505u) * 20u & kThirds
                                            : (w.high[step / 2] & 0x0A0A0A0Au) * 10u & kThirds;
      return select_levels(table, pairs | thirds);
    }
  }
};

// Of a lane's row: what its scores are multiplied with, in two steps of which the first is a power
// of two, and what is added in between: the query's sum, of the warp's coordinates, times the bias.
struct ScoreFactors {
  float first, second, added;
};
using RowFactors = ScoreFactors[decode_parts(512)][kDecodeMostRows];  // of each part of a query

// Of a lane's rows: in registers where there are few, else read each time. Other blocks of a query
// have another second factor.
template <uint32_t kFours, uint32_t kBlocks>
class LevelFactors {
  static constexpr bool kKept = kFours < 4;

 public:
  LevelFactors(const RowFactors& of_parts, uint32_t part, uint32_t parts)
      : shared_(of_parts[part] + threadIdx.x % 4) {
#pragma unroll
    for (uint32_t i = 0; kKept && i < kFours; ++i) kept_[i] = shared_[4 * i];
#pragma unroll
    for (uint32_t i = 0; kBlocks > 1 && i < kBlocks * kFours; ++i)
      second_[i] =
          of_parts[i / kFours * (parts / kBlocks)][i % kFours * 4 + threadIdx.x % 4].second;
  }
  ScoreFactors operator[](uint32_t four) const { return kKept ? kept_[four] : shared_[4 * four]; }
  float second(uint32_t block, uint32_t four) const {
    return kBlocks > 1 ? second_[block * kFours + four] : (*this)[four].second;
  }

 private:
  const ScoreFactors* shared_;
  ScoreFactors kept_[kKept ? kFours : 1];
  float second_[kBlocks > 1 ? kBlocks* kFours : 1];
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
                         const LanePlaces& places,
                         const LevelFactors<kFours, Shape::kBlocks>& factors,
                         float (&x)[kFours][Shape::kLaneKeys]) {
  using Reader = KeyReader<Shape::kOwn, Shape::kK, Shape::kMany>;
  using Form = typename Reader::Form;
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
        const auto first = Reader::levels(table, w[0], step);
        const auto second = Reader::levels(table, w[1], step);
#pragma unroll
        for (uint32_t four = 0; four < kFours; ++four) {
          uint32_t b[2];
          q.get(four, vector * Reader::kStepsOf + step, b);
#pragma unroll
          for (uint32_t part = 0; part < Form::kParts; ++part) {
            const uint32_t a[4] = {first.part[part][0], second.part[part][0], first.part[part][1],
                                   second.part[part][1]};
            mma_s8(c[four][two], a, b[0], b[1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
    const ScoreFactors f = factors[four];
#pragma unroll
    for (uint32_t key = 0; key < kEach; ++key) {
      const int32_t(&sums)[4] = c[four][key / 2];
      // Below 2^30: 256 coordinates, 7 bits of level, 14 of the query.
      const auto sum = static_cast<float>(sums[key % 2 * 2] * 256 + sums[key % 2 * 2 + 1]);
      x[four][key] = Form::kBias == 0 ? sum * f.first : fmaf(sum, f.first, f.added);
    }
  }
}

// Scores of coordinates with one scale, times that.
template <class Shape, uint32_t kFours>
inline void scale_scores(const unsigned char* stage, const LanePlaces& places, uint32_t block,
                         const LevelFactors<kFours, Shape::kBlocks>& factors,
                         float (&x)[kFours][Shape::kLaneKeys]) {
  float scales[Shape::kLaneKeys];
  load_scales<Shape>(stage + Shape::kShape.k_scales + places.scales, block, scales);
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
    const float second = factors.second(block, four);
#pragma unroll
    for (uint32_t i = 0; i < Shape::kLaneKeys; ++i) x[four][i] *= scales[i] * second;
  }
}

// A block of a rotated query of integers becomes bytes: a row's two columns of its products, by a
// warp. `factors`, of the block's first part, become those of its parts. `row` is null where there
// is no such row: it gets zeros.
template <class Shape>
inline void put_columns(const float* row, uint32_t r, uint32_t block, uint2* to,
                        RowFactors& factors) {
  constexpr uint32_t kN = Shape::kN, kOwn = Shape::kOwn;
  constexpr uint32_t kParts = Shape::kParts / Shape::kBlocks, kItems = kN / 4 / Shape::kBlocks;
  using Reader = KeyReader<kOwn, Shape::kK, Shape::kMany>;
  const uint32_t lane = threadIdx.x % kWarp, first_part = block * kParts;
  int32_t sum[kParts] = {};
#pragma unroll
  for (uint32_t first_item = 0; first_item < kItems; first_item += kWarp) {
    if (first_item + lane >= kItems) break;
    const uint32_t i = block * kItems + first_item + lane;
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
        sum[first_item * 4 / kOwn] += static_cast<int32_t>(x[place]);
      }
      upper = permute(permute(y[0], y[1], 0x51), permute(y[2], y[3], 0x51), 0x5410);
      lower = permute(permute(x[0], x[1], 0x40), permute(x[2], x[3], 0x40), 0x5410);
    }
    auto* const words =
        reinterpret_cast<uint32_t*>(to + (r / 4 * (kN / 32) + step) * kWarp + r % 4 * 8 + j);
    words[half] = upper, words[8 + half] = lower;
  }
  using Form = typename Reader::Form;
  const ScoreFactors of = row == nullptr ? ScoreFactors{} : factors[first_part][r];
  __syncwarp();
#pragma unroll
  for (uint32_t part = 0; part < kParts; ++part) {
    float all = 0;
    if (Form::kBias != 0) all = static_cast<float>(__reduce_add_sync(kAll, sum[part]));  // < 2^22
    if (lane == 0)
      factors[first_part + part][r] = {of.first * Form::kStep, of.second,
                                       -all * Form::kBias * of.first};
  }
}

}  // namespace gyre::cuda
