#pragma once
// Decode attention over 16-bit keys and values. Queries are the rows of a product, their first part
// 0 to 7, what that leaves 8 to 15 (or 16 rows in two products), keys its columns; then values are
// the rows, coordinates by keys, and a lane already has the weights of just the keys it must name.
#include "attention_decode_keys.cuh"

namespace gyre::cuda {

// Of a lane's rows. Those that are only there to fill a product are as real ones.
template <uint32_t kHalves>
struct HalfFactors {
  ScoreFactors of[kHalves];

  HalfFactors(const ScoreFactors* shared, uint32_t rows) {
#pragma unroll
    for (uint32_t i = 0; i < kHalves; ++i) of[i] = shared[(8 * i + threadIdx.x % kWarp / 4) % rows];
  }
};

// s[half][t][i]: the score of row g (+ 8 half) for key 8 t + 2 j + i.
template <class Shape, uint32_t kRows>
inline void score_halves(const uint4* q, const unsigned char* stage,
                         const HalfFactors<eights(kRows)>& factors,
                         float (&s)[eights(kRows)][Shape::kTiles][2]) {
  constexpr uint32_t kT = Shape::kTiles, kHalves = eights(kRows);
  constexpr DecodePlane kPlane = Shape::kShape.k[0];
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  float c[kT][4] = {}, d[kT][4] = {};  // 8 rows: shorter chains; 16 rows: first parts and rests
#pragma unroll
  for (uint32_t span = 0; span < Shape::kOwn / 32; ++span) {
    uint32_t a[2 * kHalves][4];
#pragma unroll
    for (uint32_t i = 0; i < 2 * kHalves; ++i) {
      const uint4 x = q[(span * 2 * kHalves + i) * kWarp];
      a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
    }
#pragma unroll
    for (uint32_t t = 0; t < kT; ++t) {
      const uint32_t k = 8 * t + g;
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
    float sums[kHalves];
    if constexpr (kHalves == 1) {
      sums[0] = add_rest(x[e] + y[e], x[e + 2] + y[e + 2]);
    } else {
      sums[0] = add_rest(x[e], y[e]), sums[1] = add_rest(x[e + 2], y[e + 2]);
    }
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h)
      s[h][i / 2][e] = sums[h] * factors.of[h].first * factors.of[h].second;
  }
}

// A query row becomes two 16-bit floats: one lane's words for one product, first parts in the first
// two, what they leave in the others.
template <uint32_t kK>
inline void half_words(const float* row, uint32_t step, uint32_t j, uint32_t (&words)[4]) {
  using T = typename HalfType<kK>::type;
  words[0] = words[1] = words[2] = words[3] = 0;
#pragma unroll
  for (uint32_t place = 0; place < 4; ++place) {
    const float x = row[step / 2 * 32 + 8 * j + step % 2 * 4 + place];
    const TwoParts<T> part(x);
    words[place / 2] |= static_cast<uint32_t>(part.first.bits) << (place % 2 * 16);
    words[2 + place / 2] |= static_cast<uint32_t>(part.rest.bits) << (place % 2 * 16);
  }
}

// Operands of products, [step][operand][lane]. Of 8 rows one: first parts as rows 0 to 7, the rest
// as rows 8 to 15. Of 16 rows two: the first parts, then the rest.
template <uint32_t kK, uint32_t kN, uint32_t kRows, class Row>
inline void put_rows(const Row& row, uint4* to) {
  for (uint32_t i = threadIdx.x; i < kN / 16 * kWarp; i += blockDim.x) {
    const uint32_t step = i / kWarp, lane = i % kWarp, g = lane / 4;
    uint32_t a[4], b[4];
    half_words<kK>(row(g), step, lane % 4, a);
    if constexpr (eights(kRows) == 1) {
      to[i] = make_uint4(a[0], a[2], a[1], a[3]);
    } else {
      half_words<kK>(row(g + 8), step, lane % 4, b);
      to[step * 2 * kWarp + lane] = make_uint4(a[0], b[0], a[1], b[1]);
      to[(step * 2 + 1) * kWarp + lane] = make_uint4(a[2], b[2], a[3], b[3]);
    }
  }
}

// Of a row, alike in its four lanes but for the sum. Probabilities are relative to `from`, which
// follows the largest logit only when that is far beyond it: sums would have to follow each time.
struct DecodeRow {
  float from, max, sum;
};
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

// Scores in base 2 become probabilities. kUp: `from` lies that far above the largest logit, so that
// sums of large bf16 values do not overflow.
template <int32_t kUp, uint32_t kT, uint32_t kColumns>
inline void fold_scores(float (&x)[kT][2], DecodeRow& row, float (&acc)[kColumns][4]) {
  float max = fmaxf(x[0][0], x[0][1]);
#pragma unroll
  for (uint32_t t = 1; t < kT; ++t) max = fmaxf(max, fmaxf(x[t][0], x[t][1]));
  row.max = fmaxf(row.max, row_max(max));
  // The difference is exact where a sum would be rounded.
  if (__any_sync(kAll, row.max - row.from > kFarBeyond - kUp) != 0) {
    const float from = fmaxf(row.max, kLowest) + kUp, keep = exp2_fast(row.from - from);
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

// Probabilities over f16 values, at most 2^kFarBeyond, are scaled up: small ones stay normal.
constexpr int32_t kWeightUp = 7;

template <class T>
inline uint32_t pack_two(float a, float b) {
  return from_float<T>(a).bits | static_cast<uint32_t>(from_float<T>(b).bits) << 16;
}

template <class Shape, uint32_t kHalves>
inline void add_halves(const unsigned char* stage, const float (&p)[kHalves][2][2],
                       float (&acc)[kHalves][Shape::kOwn / 16][4]) {
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
  for (uint32_t i = 0; i < Shape::kOwn / 16; ++i) {
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
