#pragma once
// Decode attention: scores to weights, and the weighted sum of levels of values. Values are the
// rows of a product, coordinates by keys; weights are its columns, integers of 16 bits, each byte
// in a column of its own. Sums stay integers, in units of the row's, from the first key to the
// last.
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

// Of tile j, from coordinate 4 g on.
template <uint32_t kFormat>
inline uint32_t values_place(const DecodePlane (&planes)[2], uint32_t plane) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const DecodePlane& p = planes[plane];
  const uint32_t bits = plane == 0 ? abi::kv_low_bits(kFormat) : abi::kv_high_bits(kFormat);
  return p.at + j * p.tile_pitch + 4 * g * bits;
}

// `further` coordinates from the lane's first.
template <uint32_t kFormat>
inline ValueWords<kFormat> read_values(const unsigned char* low, const unsigned char* high,
                                       uint32_t further) {
  using Words = ValueWords<kFormat>;
  Words w;
  load_words<Words::kLow>(low + further * Words::kLow, w.low);
  if constexpr (Words::kHigh != 0) load_words<Words::kHigh>(high + further * Words::kHigh, w.high);
  return w;
}

// Coordinates 2 pair and 2 pair + 1 of the four.
template <uint32_t kFormat, bool kMany, uint32_t kParts>
inline void value_levels(const Table& table, const ValueWords<kFormat>& w, uint32_t pair,
                         Unpacked<kParts> (&x)[2]) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    x[0] = {{{w.low[4 * pair], w.low[4 * pair + 1]}}};
    x[1] = {{{w.low[4 * pair + 2], w.low[4 * pair + 3]}}};
  } else if constexpr (kFormat == abi::kTq4) {
    x[0] = unpack_nibbles<kMany>(table, w.low[2 * pair]);
    x[1] = unpack_nibbles<kMany>(table, w.low[2 * pair + 1]);
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
      x[i] = {{{(y & 0x0F0F0F0Fu) | high.first << 4, (y >> 4 & 0x0F0F0F0Fu) | high.second << 4}}};
    }
  } else {
    // One word has both coordinates, 16 bits each: tokens 0 4 1 5 at its even pairs, 2 6 3 7 at its
    // odd ones. Third bits, a byte for each coordinate, go to the selectors' third bits alike.
    uint32_t even = w.low[pair] & kPairs, odd = w.low[pair] >> 2 & kPairs;
    if constexpr (kHigh != 0) {
      constexpr uint32_t kFifths = 0x00330033u;
      const uint32_t h = permute(w.high[0], 0, pair == 0 ? 0x4140 : 0x4342);
      even |= (h & kFifths) * 516u & kThirds;
      odd |= (h & kFifths << 2) * 129u & kThirds;
    }
    const Unpacked<1> e = select_levels(table, even), o = select_levels(table, odd);
    x[0] = {{{e.part[0][0], o.part[0][0]}}};
    x[1] = {{{e.part[0][1], o.part[0][1]}}};
  }
}

// Of a row, alike in its eight lanes but for max, sum and weights. Probabilities are relative to
// 2^from, weights are multiples of 1 / per, a power of two; both follow only when they must: sums
// would have to follow each time. A row that met an infinite weight has per 0: from then on only
// such weights count, once each. One that met NaN has per NaN, and so will its values.
struct LevelRow {
  float from, per, max, sum;
  uint32_t weights;  // their sum, as the bits of floats: see LaneWeights::surplus
};
// `from` lies that far above the largest logit, so that a weight times a scale, of up to 2^128,
// does not overflow.
constexpr float kAbove = 10;
constexpr float kMostPer = 0x1p126f;

constexpr uint32_t kIntegers = 0x4B000000u;  // 2^23 as a float: an integer added shows in its bits

// Weights are rounded up or down as often as their fraction says, by a threshold from 0 to 1 that
// differs from lane to lane and from chunk to chunk: many that are far below 1 still count for what
// they are. `upper` and `from` are turn_weights', `surplus` what the sum of a lane's weights has
// too much, because they are integers that show in the bits of floats.
struct LaneWeights {
  float threshold;
  uint32_t upper, from, surplus;

  // `keys` were counted. By the golden ratio, which comes near everything soonest.
  void step(uint32_t keys) {
    threshold += threshold < 0.381966f ? 0.618034f : -0.381966f;
    surplus += keys * kIntegers;
  }
};
inline LaneWeights lane_weights() {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  return {(static_cast<float>(g) + 0.5f) * 0.125f, g % 2 == 0 ? 0x7632u : 0x5410u,
          8 * j + g % 2 * 4 + g / 2, 0};
}

constexpr uint32_t kTooLarge = kIntegers + 0x10000u;
inline uint32_t whole_part(float x) { return __float_as_uint(__fadd_rz(x, 8388608.0f)); }

// Largest of a row's eight lanes, of some rows at once: they wait for each other's lanes together.
template <uint32_t kCount>
inline void column_max(float (&x)[kCount]) {
#pragma unroll
  for (int by = 4; by < 32; by *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) x[i] = fmaxf(x[i], __shfl_xor_sync(kAll, x[i], by));
  }
}
inline float column_max(float x) {
  float one[1] = {x};
  column_max(one);
  return one[0];
}

// Sums become multiples of 2^shift, to the nearest. What the upper bytes' leave goes to the lower
// ones': half a unit of theirs alone would be 128 of the lower.
template <uint32_t kSums>
inline void shift_sums(const LaneWeights& lane, LevelRow& row, int32_t (&acc)[kSums][4],
                       uint32_t shift) {
  constexpr uint32_t kMost = 48, kStep = 16;  // leaves nothing of a sum; what 32 bits have room for
  auto weights = static_cast<int32_t>(row.weights - lane.surplus);
#pragma unroll 1
  for (uint32_t left = shift < kMost ? shift : kMost; left != 0;) {
    const uint32_t by = left < kStep ? left : kStep;
    const int32_t half = 1 << (by - 1), rest = (1 << by) - 1;
#pragma unroll
    for (uint32_t i = 0; i < kSums * 2; ++i) {
      int32_t &upper = acc[i / 2][i % 2 * 2], &lower = acc[i / 2][i % 2 * 2 + 1];
      lower = (lower + (upper & rest) * 256 + half) >> by;
      upper >>= by;
    }
    weights = (weights + half) >> by;
    left -= by;
  }
  row.weights = static_cast<uint32_t>(weights) + lane.surplus;
}

// Largest of some.
template <uint32_t kCount>
inline float most_of(const float (&x)[kCount]) {
  float most = x[0];
#pragma unroll
  for (uint32_t i = 1; i < kCount; ++i) most = fmaxf(most, x[i]);
  return most;
}

// Scores to weights, whatever they are; `from` and `per` follow. A row's sums are to become
// multiples of 2^shift.
template <uint32_t kCount, uint32_t kKeys>
inline void weigh_anew(const LaneWeights& lane, const float (&x)[kCount][kKeys],
                       const float (&scales)[kKeys], LevelRow (&row)[kCount],
                       uint32_t (&w)[kCount][kKeys], uint32_t (&shift)[kCount]) {
  constexpr int32_t kRoom = 4;  // weights may grow so many bits before `per` must follow
  const float infinity = -minus_infinity();
  float largest[kCount], weights[kCount][kKeys], most[kCount];
  bool known[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) largest[i] = most_of(x[i]);
  column_max(largest);
#pragma unroll
  for (uint32_t four = 0; four < kCount; ++four) {
    LevelRow& r = row[four];
    shift[four] = 0;
    if (largest[four] - r.from > kFarBeyond - kAbove) {
      const float from = ceilf(fmaxf(largest[four], kLowest)) + kAbove;
      r.sum *= exp2_fast(r.from - from);
      shift[four] = static_cast<uint32_t>(fminf(from - r.from, 512.0f));
      r.from = from;
    }
    most[four] = 0;
    known[four] = true;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
      const float p = exp2_fast(x[four][i] - r.from);
      r.sum += p;
      // The scale of a slot without a key may be NaN, or never written.
      const float weight = p == 0 ? 0.0f : p * scales[i];
      weights[four][i] = weight;
      most[four] = fmaxf(most[four], weight);
      known[four] = known[four] && !is_nan(weight);
    }
  }
  column_max(most);
#pragma unroll
  for (uint32_t four = 0; four < kCount; ++four) {
    LevelRow& r = row[four];
    if (most[four] == infinity && !is_nan(r.per)) {
      if (r.per != 0) shift[four] = 512;
      r.per = 0;
    } else if (r.per > 0 && (shift[four] != 0 || most[four] * r.per >= 65535.0f)) {
      // When `from` rises, weights become smaller: `per` may rise by as much without sums to shift.
      const int32_t now = exponent_of(r.per), by = static_cast<int32_t>(shift[four]);
      const int32_t fits = most[four] == 0 ? 126 : 15 - kRoom - exponent_of(most[four]);
      int32_t up = now + by < fits ? now + by : fits;
      if (up > 126) up = 126;
      if (up < now && most[four] * r.per < 65535.0f) up = now;
      shift[four] = static_cast<uint32_t>(by + now - up);
      r.per = power_of_two(up);
    }
    const uint32_t mine = 0x11111111u << threadIdx.x % 4;
    if ((__ballot_sync(kAll, !known[four]) & mine) != 0) r.per = __uint_as_float(0x7FC00000u);
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
      w[four][i] = r.per == 0 ? kIntegers + (weights[four][i] == infinity ? 1u : 0u)
                              : whole_part(fmaf(weights[four][i], r.per, lane.threshold));
    }
  }
}

// Columns of the product with values: weights of the 8 tokens of tile j, upper bytes in the even
// columns, lower ones in the odd. Lane (g, j) had those of row j and keys 4 g to 4 g + 3.
inline void turn_weights(const LaneWeights& lane, const uint32_t* w, uint32_t (&b)[2]) {
  const uint32_t first = permute(w[0], w[1], 0x5140), last = permute(w[2], w[3], 0x5140);
  // Lanes of even g give upper bytes to even columns, while those of odd g give lower ones to odd
  // columns; then the other way round.
  const auto from = static_cast<int>(lane.from);
  const uint32_t one = __shfl_sync(kAll, permute(first, last, lane.upper), from);
  const uint32_t other = __shfl_sync(kAll, permute(first, last, lane.upper ^ 0x2222u), from ^ 4);
  const bool even = threadIdx.x % 8 < 4;
  b[0] = even ? one : other;
  b[1] = even ? other : one;
}

// Scores in base 2 become weights: b[row][product].
template <class Shape, uint32_t kFours>
inline void weigh(const LaneWeights& lane, float (&x)[kFours][Shape::kLaneKeys],
                  const unsigned char* scales_at, uint32_t block, LevelRow (&row)[kFours],
                  int32_t (&acc)[kFours][Shape::kOwn / 16][4],
                  uint32_t (&b)[kFours][Shape::kProducts][2]) {
  constexpr uint32_t kKeys = Shape::kLaneKeys;
  float scales[kKeys];
  load_scales<Shape>(scales_at, block, scales);
  uint32_t w[kFours][kKeys], all = 0;
  float sum[kFours];
  bool usual = true;
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
    LevelRow& r = row[four];
    r.max = fmaxf(r.max, most_of(x[four]));
    float p[kKeys], more = 0;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) p[i] = exp2_fast(x[four][i] - r.from);
#pragma unroll
    for (uint32_t i = 0; i < kKeys; i += 2) more += p[i] + p[i + 1];
    sum[four] = r.sum + more;
    usual = usual && sum[four] < 0x1p64f;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
      w[four][i] = whole_part(fmaf(p[i], scales[i] * r.per, lane.threshold));
      all |= w[four][i];
    }
  }
  if (__any_sync(kAll, all >= kTooLarge || !usual) != 0) {
    uint32_t shift[kFours];
    bool held[kFours], any = false;  // which rows have sums; whether some are to shift
#pragma unroll
    for (uint32_t four = 0; four < kFours; ++four) held[four] = row[four].sum != 0;
    weigh_anew(lane, x, scales, row, w, shift);
#pragma unroll
    for (uint32_t four = 0; four < kFours; ++four) any = any || (shift[four] != 0 && held[four]);
    if (__any_sync(kAll, any) != 0) {
#pragma unroll
      for (uint32_t four = 0; four < kFours; ++four)
        shift_sums(lane, row[four], acc[four], shift[four]);
    }
  } else {
#pragma unroll
    for (uint32_t four = 0; four < kFours; ++four) row[four].sum = sum[four];
  }
#pragma unroll
  for (uint32_t four = 0; four < kFours; ++four) {
    if constexpr (Shape::FormV::kBias != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kKeys; ++i) row[four].weights += w[four][i];
    }
#pragma unroll
    for (uint32_t i = 0; i < Shape::kProducts; ++i) turn_weights(lane, w[four] + i * 4, b[four][i]);
  }
}

// A key adds up to 127 times 255 to a sum, and less than 2^16 to one of its lanes' weights. Called
// so often that sums, which are at most halved each time, leave shift_sums room in 32 bits; those
// of a row's eight lanes' weights together too.
constexpr uint32_t kChunksToCheck = 512;
static_assert(2 * int64_t{127 * 255 * 64} * kChunksToCheck + (1 << 24) + (1 << 15) < int64_t{1}
                                                                                         << 31);
template <uint32_t kSums>
inline void check_sums(const LaneWeights& lane, LevelRow& row, int32_t (&acc)[kSums][4]) {
  uint32_t all = 4 * (row.weights - lane.surplus);
#pragma unroll
  for (uint32_t i = 0; i < kSums * 4; ++i) {
    const int32_t x = acc[i / 4][i % 4];
    all |= static_cast<uint32_t>(x < 0 ? -x : x);
  }
  const uint32_t mine = 0x11111111u << threadIdx.x % 4;
  if ((__ballot_sync(kAll, all >= 1u << 29) & mine) == 0) return;
  row.per *= 0.5f;
  shift_sums(lane, row, acc, 1);
}

// acc[four][i]: coordinates 32 (i / 2) + 4 g + 2 (i % 2), and the next, of row 4 four + j: sums of
// upper and of lower bytes of each.
template <class Shape, uint32_t kFours>
inline void add_levels(const Table& table, const unsigned char* low, const unsigned char* high,
                       const uint32_t (&b)[kFours][Shape::kProducts][2],
                       int32_t (&acc)[kFours][Shape::kOwn / 16][4]) {
  constexpr const DecodePlane(&kPlanes)[2] = Shape::kShape.v;
#pragma unroll
  for (uint32_t both = 0; both < Shape::kOwn / 32 * Shape::kProducts; ++both) {
    const uint32_t i = both / Shape::kProducts, product = both % Shape::kProducts;
    const ValueWords<Shape::kV> words =
        read_values<Shape::kV>(low + product * 4 * kPlanes[0].tile_pitch,
                               high + product * 4 * kPlanes[1].tile_pitch, i * 32);
#pragma unroll
    for (uint32_t pair = 0; pair < 2; ++pair) {
      Unpacked<Shape::FormV::kParts> x[2];
      value_levels<Shape::kV, Shape::kMany>(table, words, pair, x);
#pragma unroll
      for (uint32_t part = 0; part < Shape::FormV::kParts; ++part) {
        const uint32_t a[4] = {x[0].part[part][0], x[1].part[part][0], x[0].part[part][1],
                               x[1].part[part][1]};
#pragma unroll
        for (uint32_t four = 0; four < kFours; ++four)
          mma_s8_u8(acc[four][2 * i + pair], a, b[four][product][0], b[four][product][1]);
      }
    }
  }
}

}  // namespace gyre::cuda
