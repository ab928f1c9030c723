#pragma once
// Decode attention: scores to weights, and the weighted sum of values. Values are the rows of a
// product, coordinates by keys; weights are its columns, and a lane already has those of just the
// keys it must name. Over levels, weights are integers of 16 bits in units of the chunk's largest,
// a byte to a product: sums of a chunk are integers, and exact.
#include "attention_decode_keys.cuh"

namespace gyre::cuda {

// The token of a tile that place i of a lane's eight is.
template <uint32_t kFormat>
constexpr uint32_t value_item(uint32_t place) {
  return abi::kv_bits(kFormat) <= 4 ? place % 2 * 4 + place / 2 : place;
}

// Four neighbouring coordinates of a tile: bits of 8 tokens each.
template <uint32_t kFormat>
struct ValueWords {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  uint32_t low[kLow], high[kHigh != 0 ? kHigh : 1];
};

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

template <uint32_t kFormat>
inline ValueWords<kFormat> read_values(const unsigned char* stage, const DecodePlane (&planes)[2],
                                       uint32_t tile, uint32_t coordinate) {
  using Words = ValueWords<kFormat>;
  Words w;
  load_words<Words::kLow>(
      stage + planes[0].at + tile * planes[0].tile_pitch + coordinate * Words::kLow, w.low);
  if constexpr (Words::kHigh != 0)
    load_words<Words::kHigh>(
        stage + planes[1].at + tile * planes[1].tile_pitch + coordinate * Words::kHigh, w.high);
  return w;
}

// Coordinates 2 pair and 2 pair + 1 of the four.
template <uint32_t kFormat>
inline void value_levels(const Table& table, const ValueWords<kFormat>& w, uint32_t pair,
                         Unpacked<kFormat> (&x)[2]) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    x[0] = {{{w.low[4 * pair], w.low[4 * pair + 1]}}};
    x[1] = {{{w.low[4 * pair + 2], w.low[4 * pair + 3]}}};
  } else if constexpr (kFormat == abi::kTq4) {
    x[0] = unpack_nibbles(table, w.low[2 * pair]);
    x[1] = unpack_nibbles(table, w.low[2 * pair + 1]);
  } else if constexpr (abi::kv_low_bits(kFormat) == 4) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t y = w.low[2 * pair + i];
      Levels8 high;
      if constexpr (kHigh == 2) {
        high = spread_pairs(i == 0 ? w.high[pair] & 0xFFFFu : w.high[pair] >> 16);
      } else {
        high = spread_bits(w.high[0] >> (16 * pair + 8 * i) & 255u);
      }
      x[i] = {{{levels_of_bytes<kFormat, false>((y & 0x0F0F0F0Fu) | high.first << 4),
                levels_of_bytes<kFormat, false>((y >> 4 & 0x0F0F0F0Fu) | high.second << 4)}}};
    }
  } else {
    // One word has both coordinates, 16 bits each: tokens 0 4 1 5 at its even pairs, 2 6 3 7 at its
    // odd ones. Third bits, a byte for each coordinate, go to the selectors' third bits alike.
    uint32_t even = w.low[pair] & kPairs, odd = w.low[pair] >> 2 & kPairs;
    if constexpr (kHigh != 0) {
      constexpr uint32_t kFifths = 0x00330033u;
      const uint32_t h = permute(w.high[0], 0, pair == 0 ? 0x4140 : 0x4342);
      even |= (h & kFifths) * 516u & kThirds;
      odd |= (h >> 2 & kFifths) * 516u & kThirds;
    }
    const Unpacked<kFormat> e = select_levels<kFormat>(table, even);
    const Unpacked<kFormat> o = select_levels<kFormat>(table, odd);
    x[0] = {{{e.part[0][0], o.part[0][0]}}};
    x[1] = {{{e.part[0][1], o.part[0][1]}}};
  }
}

// Of a row, alike in its four lanes but for the sum. Probabilities are relative to `from`, which
// follows the largest logit only when that is far beyond it: sums would have to follow each time.
struct DecodeRow {
  float from, max, sum;
};
constexpr float kFarBeyond = 8;              // in base 2
constexpr float kLowest = -3.402823466e38f;  // where `from` begins: -inf less -inf would be NaN

// Largest of a row's four lanes.
inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}

// Values of rows g become values of rows 2 j and 2 j + 1, which a lane has sums of.
inline float2 turn_rows(float of_row) {
  const int j = static_cast<int>(threadIdx.x % 4);
  return make_float2(__shfl_sync(kAll, of_row, 8 * j), __shfl_sync(kAll, of_row, 8 * j + 4));
}

// Scores in base 2 become probabilities. kAbove: `from` lies that far above the largest logit, so
// that a weight times a scale, of up to 2^128, neither overflows nor has no reciprocal.
template <int32_t kAbove, uint32_t kT, uint32_t kColumns>
inline void fold_scores(float (&x)[kT][2], DecodeRow& row, float (&acc)[kColumns][4]) {
  float max = fmaxf(x[0][0], x[0][1]);
#pragma unroll
  for (uint32_t t = 1; t < kT; ++t) max = fmaxf(max, fmaxf(x[t][0], x[t][1]));
  row.max = fmaxf(row.max, row_max(max));
  // The difference is exact where a sum would be rounded.
  if (__any_sync(kAll, row.max - row.from > kFarBeyond - kAbove) != 0) {
    const float from = fmaxf(row.max, kLowest) + kAbove, keep = exp2_fast(row.from - from);
    row.from = from;
    row.sum *= keep;
    const float2 of = turn_rows(keep);
#pragma unroll
    for (uint32_t i = 0; i < kColumns * 4; ++i) acc[i / 4][i % 4] *= i % 2 == 0 ? of.x : of.y;
  }
#pragma unroll
  for (uint32_t t = 0; t < kT; ++t) {
    x[t][0] = exp2_fast(x[t][0] - row.from), x[t][1] = exp2_fast(x[t][1] - row.from);
    row.sum += x[t][0] + x[t][1];
  }
}

// Eight weights of 16 bits as bytes, and what they are multiples of. In pairs of rows g and g + 4,
// which have the same weights, one has the upper bytes and the other the lower; else a row has
// both.
struct ByteWeights {
  uint32_t words[2], lower[2];
  float unit;  // of `words`; of `lower` it is 2^-8 of that
};

template <class Scale>
inline ByteWeights byte_weights(const float (&p)[4][2], const Scale& scale, bool paired) {
  float w[8], sum = 0, largest = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    w[i] = p[i / 2][i % 2] * scale(i);
    largest = fmaxf(largest, w[i]);
    sum += w[i];
  }
  largest = row_max(largest);
  const bool usual = sum < __uint_as_float(0x7F800000u);
  float nan_or_one = 1.0f;
  if (__any_sync(kAll, !usual) != 0) {
    // The scale of a slot without a key may be NaN, or never written. Where a weight is infinite,
    // it counts once and all others not at all.
    sum = largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (p[i / 2][i % 2] == 0) w[i] = 0;
      sum += w[i], largest = fmaxf(largest, w[i]);
    }
    largest = row_max(largest);
    const uint32_t group = 15u << (threadIdx.x % kWarp / 4 * 4);
    if ((__ballot_sync(kAll, is_nan(sum)) & group) != 0) nan_or_one = __uint_as_float(0x7FC00000u);
    if (!is_finite(largest)) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) w[i] = is_finite(w[i]) ? 0.0f : 1.0f;
      nan_or_one *= largest, largest = 1.0f;
    }
  }
  // Below that, what is lost is below the smallest float once the scales' bias is taken off.
  constexpr float kMost = 65535.0f;
  const float base = fmaxf(largest, 0x1p-110f), per = reciprocal(base) * kMost;
  uint32_t bits[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) bits[i] = __float_as_uint(fmaf(w[i], per, kMagic));
  const bool upper = !paired || threadIdx.x % kWarp < 16;
  ByteWeights out;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const auto pick = [&](uint32_t select) {
      const uint32_t a = permute(bits[4 * i], bits[4 * i + 1], select);
      const uint32_t b = permute(bits[4 * i + 2], bits[4 * i + 3], select);
      return permute(a, b, 0x5410);
    };
    out.words[i] = pick(upper ? 0x0051u : 0x0040u);
    if (!paired) out.lower[i] = pick(0x0040u);
  }
  out.unit = base * (upper ? 0x1p-31f / kMost * 256.0f : 0x1p-31f / kMost) * nan_or_one;
  return out;
}

// Two coordinates of every row g times the weights of 32 keys.
template <class Shape>
inline void add_product(uint32_t magic, const Unpacked<Shape::kV> (&x)[2],
                        const uint32_t (&weights)[2], float2 unit, float (&sum)[4]) {
  const auto start = static_cast<int32_t>(magic);
  int32_t c[4] = {start, start, start, start};
#pragma unroll
  for (uint32_t part = 0; part < kLevelParts<Shape::kV>; ++part) {
    const uint32_t a[4] = {x[0].part[part][0], x[1].part[part][0], x[0].part[part][1],
                           x[1].part[part][1]};
    mma_s8_u8(c, a, weights[0], weights[1]);
  }
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    sum[i] = fmaf(__int_as_float(c[i]) - kMagic, i % 2 == 0 ? unit.x : unit.y, sum[i]);
}

// acc[i]: coordinates 32 (i / 2) + 4 g + 2 (i % 2), and the next, of rows 2 j and 2 j + 1.
template <class Shape, uint32_t kHalves>
inline void add_levels(const Tables& tables, const unsigned char* stage, bool paired,
                       const ByteWeights (&w)[kHalves][Shape::kBlocks],
                       float (&acc)[kHalves][Shape::kN / 16][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  constexpr uint32_t kOfBlock = Shape::kN / 32 / Shape::kBlocks;
#pragma unroll
  for (uint32_t block = 0; block < Shape::kBlocks; ++block) {
    float2 unit[kHalves];
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h) unit[h] = turn_rows(w[h][block].unit);
#pragma unroll
    for (uint32_t four = block * kOfBlock; four < (block + 1) * kOfBlock; ++four) {
      const ValueWords<Shape::kV> words =
          read_values<Shape::kV>(stage, Shape::kShape.v, j, four * 32 + 4 * g);
#pragma unroll
      for (uint32_t pair = 0; pair < 2; ++pair) {
        Unpacked<Shape::kV> x[2];
        value_levels<Shape::kV>(tables.v, words, pair, x);
#pragma unroll
        for (uint32_t h = 0; h < kHalves; ++h) {
          const ByteWeights& of = w[h][block];
          add_product<Shape>(tables.magic, x, of.words, unit[h], acc[h][four * 2 + pair]);
          if (!paired)
            add_product<Shape>(tables.magic, x, of.lower,
                               make_float2(unit[h].x * 0x1p-8f, unit[h].y * 0x1p-8f),
                               acc[h][four * 2 + pair]);
        }
      }
    }
  }
}

// Probabilities over f16 values, at most 2^kFarBeyond, are scaled up: small ones stay normal.
constexpr int32_t kWeightUp = 7;

template <class T>
inline uint32_t pack_two(float a, float b) {
  return from_float<T>(a).bits | static_cast<uint32_t>(from_float<T>(b).bits) << 16;
}

template <class Shape, uint32_t kHalves>
inline void add_halves(const unsigned char* stage, const float (&p)[kHalves][2][2],
                       float (&acc)[kHalves][Shape::kN / 16][4]) {
  constexpr DecodePlane kPlane = Shape::kShape.v[0];
  constexpr bool kRest = Shape::kV == kPlanBf16;
  using T = typename HalfType<Shape::kV>::type;
  uint32_t w[kHalves][2], rest[kHalves][2];
  const float up = kRest ? 1.0f : power_of_two(kWeightUp);
#pragma unroll
  for (uint32_t i = 0; i < kHalves * 2; ++i) {
    const float a = p[i / 2][i % 2][0] * up, b = p[i / 2][i % 2][1] * up;
    const uint32_t x = w[i / 2][i % 2] = pack_two<T>(a, b);
    if constexpr (kRest)
      rest[i / 2][i % 2] =
          pack_two<T>(a - __uint_as_float(x << 16), b - __uint_as_float(x & 0xFFFF0000u));
  }
  const uint32_t lane = threadIdx.x % kWarp, row = lane % 8 + lane / 16 * 8, side = lane / 8 % 2;
  const unsigned char* const values =
      stage + kPlane.at + row / 8 * kPlane.tile_pitch + row % 8 * kPlane.bytes;
#pragma unroll
  for (uint32_t i = 0; i < Shape::kN / 16; ++i) {
    uint32_t a[4];
    load_transposed(a, values + ((2 * i + side) ^ row % 8) * 16);
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h) {
      if constexpr (kRest) HalfType<Shape::kV>::mma(acc[h][i], a, rest[h][0], rest[h][1]);
      HalfType<Shape::kV>::mma(acc[h][i], a, w[h][0], w[h][1]);
    }
  }
}

}  // namespace gyre::cuda
