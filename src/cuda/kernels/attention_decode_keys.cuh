#pragma once
// Decode attention: stored keys to scores. Queries are the rows of a product, their first part 0 to
// 7, what that leaves 8 to 15 (or 16 rows in two products), keys its columns. A dot product does
// not care in which order coordinates come: each lane reads its share of a key in one piece, and
// the queries are arranged to match.
#include "attention_decode_plan.cuh"
#include "codec.cuh"
#include "softmax.cuh"

namespace gyre::cuda {

constexpr uint32_t kMagicBits =
    0x4B400000u;  // as a float 1.5 2^23: an integer added to it is exact
constexpr float kMagic = 12582912.0f;

// What one lane unpacks at a time: two words of B, or of A, four codes each. Levels of tq4 are the
// sum of two parts.
template <uint32_t kFormat>
constexpr uint32_t kLevelParts = kFormat == abi::kTq4 ? 2 : 1;

template <uint32_t kFormat>
struct Unpacked {
  uint32_t part[kLevelParts<kFormat>][2];
};

// Levels by small tables. Kept in registers: the compiler would make the constants anew each time.
struct Table {
  uint32_t bytes[4];
};
struct Tables {
  Table k, v;
  uint32_t magic;
};

// Eight nibbles, sign above magnitude. A selector with its top bit set spreads a byte's sign: the
// first table holds |x| + 1, the second -|x|, so that a plus selects |x| + 1 and -1, a minus 0 and
// -|x|.
template <uint32_t kFormat>
inline Table make_table(uint32_t* place) {
  Table table = {};
  constexpr uint32_t kOne = kFormat == abi::kTq4 ? 0x01010101u : 0;
  if constexpr (abi::kv_is_native(kFormat) && abi::kv_bits(kFormat) <= 4) {
    table.bytes[0] = keep(level_bytes(kFormat, 0) + kOne, place);
    table.bytes[1] = level_bytes(kFormat, 4) + kOne;
    table.bytes[2] = keep(level_bytes(kFormat, 8), place);
    table.bytes[3] = level_bytes(kFormat, 12);
  }
  return table;
}

inline Unpacked<abi::kTq4> unpack_nibbles(const Table& table, uint32_t w) {
  const uint32_t x = w ^ 0x88888888u;
  const uint32_t(&t)[4] = table.bytes;
  return {{{permute(t[0], t[1], w), permute(t[0], t[1], w >> 16)},
           {permute(t[2], t[3], x), permute(t[2], t[3], x >> 16)}}};
}

// Selectors in nibbles, up to three bits each, to the levels of a small table.
template <uint32_t kFormat>
inline Unpacked<kFormat> select_levels(const Table& table, uint32_t nibbles) {
  const uint32_t(&t)[4] = table.bytes;
  return {{{permute(t[0], t[1], nibbles), permute(t[0], t[1], nibbles >> 16)}}};
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

  // The words of read `vector`; `row` begins the key's row of the plane, `swap` is what its place
  // in it is mixed with.
  static void load(const unsigned char* row, uint32_t swap, uint32_t bytes, uint32_t at,
                   uint32_t (&w)[kWords]) {
    const unsigned char* const from = row + (bytes >= 128 ? at ^ swap : at);
    if constexpr (kWords == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    } else if constexpr (kWords == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      w[0] = x.x, w[1] = x.y;
    } else {
      w[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }

  struct Words {
    uint32_t low[kWords], high[kHigh != 0 ? kWords : 1];
  };

  static Words read(const unsigned char* stage, const DecodePlane (&planes)[2], uint32_t key,
                    uint32_t swap, uint32_t vector, uint32_t j) {
    Words w;
    const uint32_t at = word_at(j, vector * 4);
    const auto row = [&](const DecodePlane& p) {
      return stage + p.at + key / 8 * p.tile_pitch + key % 8 * p.bytes;
    };
    load(row(planes[0]), swap, planes[0].bytes, at, w.low);
    if constexpr (kHigh != 0) {
      constexpr uint32_t kHighGroup = abi::kv_group(kHigh);
      const uint32_t first = at / 16 * kGroup;  // coordinate of the group
      load(row(planes[1]), swap, planes[1].bytes, first / kHighGroup * 16 + at % 16, w.high);
      const uint32_t shift = first % kHighGroup / 16 * kHigh;
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) w.high[i] >>= shift;
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
      // Bits 0 and 2 of a byte to bits 2 and 6: what else the product holds is masked.
      const uint32_t thirds = (w.high[step / 2] >> (step % 2) & 0x05050505u) * 20u & kThirds;
      return select_levels<kFormat>(table, pairs | thirds);
    }
  }
};

// Of a lane's row: what its scores are multiplied with, in two steps of which the first is a power
// of two.
struct ScoreFactors {
  float first, second;
};

// s[half][t][i]: the score of row g (+ 8 half) for the key in column 2 j + i of product t.
template <class Shape, uint32_t kRows, class Scale>
inline void score_levels(const Tables& tables, const uint4* q, const unsigned char* stage,
                         const ScoreFactors (&factors)[kRows / 8], const Scale& scale,
                         float (&s)[kRows / 8][Shape::kTiles][2]) {
  using Reader = KeyReader<Shape::kN, Shape::kK>;
  constexpr uint32_t kT = Shape::kTiles, kHalves = kRows / 8, kBlocks = Shape::kShape.blocks;
  constexpr uint32_t kOfBlock = Reader::kVectors / kBlocks;
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const uint32_t swap = g % 2 * 64;
#pragma unroll
  for (uint32_t block = 0; block < kBlocks; ++block) {
    int32_t c[kHalves][kT][4];
#pragma unroll
    for (uint32_t i = 0; i < kHalves * kT * 4; ++i)
      c[i / 4 / kT][i / 4 % kT][i % 4] = static_cast<int32_t>(tables.magic);
#pragma unroll
    for (uint32_t vector = block * kOfBlock; vector < (block + 1) * kOfBlock; ++vector) {
      // As many keys at a time as there are registers for.
      constexpr uint32_t kTogether = Shape::kN * kRows >= 4096 ? 1 : kT;
#pragma unroll
      for (uint32_t first = 0; first < kT; first += kTogether) {
        typename Reader::Words w[kTogether];
#pragma unroll
        for (uint32_t t = 0; t < kTogether; ++t)
          w[t] = Reader::read(stage, Shape::kShape.k, Shape::place(first + t, g), swap, vector, j);
#pragma unroll
        for (uint32_t step = 0; step < Reader::kStepsOf; ++step) {
          uint32_t a[kHalves][4];
#pragma unroll
          for (uint32_t h = 0; h < kHalves; ++h) {
            const uint4 x = q[((vector * Reader::kStepsOf + step) * kHalves + h) * kWarp];
            a[h][0] = x.x, a[h][1] = x.y, a[h][2] = x.z, a[h][3] = x.w;
          }
#pragma unroll
          for (uint32_t t = 0; t < kTogether; ++t) {
            const Unpacked<Shape::kK> x = Reader::levels(tables.k, w[t], step);
#pragma unroll
            for (uint32_t i = 0; i < kLevelParts<Shape::kK> * kHalves; ++i)
              mma_s8(c[i % kHalves][first + t], a[i % kHalves], x.part[i / kHalves][0],
                     x.part[i / kHalves][1]);
          }
        }
      }
    }
    // Both parts are below 2^22: 256 coordinates, 7 bits of level, 7 of the query. Rounded once,
    // to one of 2^30.
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h) {
      const float one = factors[h].first, upper = 256 * one, less = -257 * kMagic * one;
#pragma unroll
      for (uint32_t i = 0; i < kT * 2; ++i) {
        const float unit = scale(block, i / 2, i % 2) * factors[h].second;
        const float high = __int_as_float(c[0][i / 2][i % 2 + 2 * h]);
        const float low = __int_as_float(kHalves == 1 ? c[0][i / 2][i % 2 + 2]
                                                      : c[kHalves - 1][i / 2][i % 2 + 2 * h]);
        const float x = fmaf(low, one, fmaf(high, upper, less)) * unit;
        s[h][i / 2][i % 2] = block == 0 ? x : s[h][i / 2][i % 2] + x;
      }
    }
  }
}

template <class Shape, uint32_t kRows>
inline void score_halves(const uint4* q, const unsigned char* stage,
                         const ScoreFactors (&factors)[kRows / 8],
                         float (&s)[kRows / 8][Shape::kTiles][2]) {
  constexpr uint32_t kT = Shape::kTiles, kHalves = kRows / 8;
  constexpr DecodePlane kPlane = Shape::kShape.k[0];
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  float c[kT][4] = {}, d[kT][4] = {};  // 8 rows: shorter chains; 16 rows: first parts and rests
#pragma unroll
  for (uint32_t span = 0; span < Shape::kN / 32; ++span) {
    uint32_t a[2 * kHalves][4];
#pragma unroll
    for (uint32_t i = 0; i < 2 * kHalves; ++i) {
      const uint4 x = q[(span * 2 * kHalves + i) * kWarp];
      a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
    }
#pragma unroll
    for (uint32_t t = 0; t < kT; ++t) {
      const uint32_t k = Shape::place(t, g);
      const uint4 x = *reinterpret_cast<const uint4*>(
          stage + kPlane.at + k / 8 * kPlane.tile_pitch + k % 8 * kPlane.bytes +
          ((span * 64 + j * 16) ^ (k % 2 * 64)));
      HalfType<Shape::kK>::mma(c[t], a[0], x.x, x.y);
      if constexpr (kHalves == 1) {
        HalfType<Shape::kK>::mma(d[t], a[1], x.z, x.w);
      } else {
        HalfType<Shape::kK>::mma(d[t], a[1], x.x, x.y);
        HalfType<Shape::kK>::mma(c[t], a[2], x.z, x.w);
        HalfType<Shape::kK>::mma(d[t], a[3], x.z, x.w);
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kT * 2; ++i) {
    const float(&x)[4] = c[i / 2], (&y)[4] = d[i / 2];
    const uint32_t e = i % 2;
    float sums[2] = {x[e] + y[e], x[e + 2] + y[e + 2]};
    if constexpr (kHalves == 1) sums[0] += sums[1];
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h)
      s[h][i / 2][e] = sums[h] * factors[h].first * factors[h].second;
  }
}

// A query row becomes 16-bit integers in two bytes, or two 16-bit floats: one lane's words for one
// product, first parts in the first two, what they leave in the others.
template <uint32_t kK, uint32_t kN>
inline void query_words(const float* row, uint32_t step, uint32_t j, uint32_t (&words)[4]) {
  words[0] = words[1] = words[2] = words[3] = 0;
  if constexpr (abi::kv_is_native(kK)) {
#pragma unroll
    for (uint32_t place = 0; place < 8; ++place) {
      const int32_t x = __float2int_rn(row[KeyReader<kN, kK>::coordinate(j, step, place)]);
      const int32_t high = (x + 128) >> 8, low = x - high * 256;
      words[place / 4] |= (static_cast<uint32_t>(high) & 255u) << (place % 4 * 8);
      words[2 + place / 4] |= (static_cast<uint32_t>(low) & 255u) << (place % 4 * 8);
    }
  } else {
    using T = typename HalfType<kK>::type;
#pragma unroll
    for (uint32_t place = 0; place < 4; ++place) {
      const float x = row[step / 2 * 32 + 8 * j + step % 2 * 4 + place];
      const T high = from_float<T>(x), low = from_float<T>(x - to_float(high));
      words[place / 2] |= static_cast<uint32_t>(high.bits) << (place % 2 * 16);
      words[2 + place / 2] |= static_cast<uint32_t>(low.bits) << (place % 2 * 16);
    }
  }
}

// Operands of products, [step][operand][lane]. Of 8 rows one: first parts as rows 0 to 7, the rest
// as rows 8 to 15. Of 16 rows two: the first parts, then the rest.
template <uint32_t kK, uint32_t kN, uint32_t kRows, class Row>
inline void make_operands(const Row& row, uint4* to) {
  constexpr uint32_t kHalves = kRows / 8, kSteps = kN / (abi::kv_is_native(kK) ? 32 : 16);
  for (uint32_t i = threadIdx.x; i < kSteps * kWarp; i += blockDim.x) {
    const uint32_t step = i / kWarp, lane = i % kWarp, g = lane / 4;
    uint32_t a[4], b[4];
    query_words<kK, kN>(row(g), step, lane % 4, a);
    if constexpr (kHalves == 1) {
      to[i] = make_uint4(a[0], a[2], a[1], a[3]);
    } else {
      query_words<kK, kN>(row(g + 8), step, lane % 4, b);
      to[step * 2 * kWarp + lane] = make_uint4(a[0], b[0], a[1], b[1]);
      to[(step * 2 + 1) * kWarp + lane] = make_uint4(a[2], b[2], a[3], b[3]);
    }
  }
}

}  // namespace gyre::cuda
