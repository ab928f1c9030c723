#pragma once
// Decode attention: the weighted sum of V. V is the A operand, coordinates by keys, weights fill B.
// Over levels each weight byte has a column of its own, and sums stay integers. Over 16-bit V a
// lane already holds the weights of the keys that its B fragment names.
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/sums.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// Four neighbouring coordinates of a tile: bits of 8 tokens each.
template <uint32_t kFormat>
struct ValueWords {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  uint32_t low[kLow], high[kHigh != 0 ? kHigh : 1];

  // `ahead` coordinates from the lane's first.
  static ValueWords read(const unsigned char* low, const unsigned char* high, uint32_t ahead) {
    ValueWords w;
    load_shared_words<kLow>(low + ahead * kLow, w.low);
    if constexpr (kHigh != 0) load_shared_words<kHigh>(high + ahead * kHigh, w.high);
    return w;
  }
  // Coordinates 2 pair and 2 pair + 1 of the four.
  template <bool kManyRows, uint32_t kTerms>
  void unpack(const LevelTable& table, uint32_t pair, Operands<kTerms> (&x)[2]) const {
    unpack_values<kFormat, kManyRows>(table, low + pair * (kLow / 2), high[kHigh == 2 ? pair : 0],
                                      pair, x);
  }
};

template <class Traits>
inline void add_levels(const LevelTable& table, const unsigned char* low, const unsigned char* high,
                       LevelSums<Traits>& to) {
  using Words = ValueWords<Traits::kV>;
  constexpr const DecodePlane(&kPlanes)[2] = Traits::kStage.v;
#pragma unroll
  for (uint32_t step = 0; step < LevelSums<Traits>::kSpans * Traits::kMmas; ++step) {
    const uint32_t i = step / Traits::kMmas, mma = step % Traits::kMmas;
    const uint32_t block = LevelSums<Traits>::block_of(2 * i);
    const Words words = Words::read(low + mma * 4 * kPlanes[0].tile_pitch,
                                    high + mma * 4 * kPlanes[1].tile_pitch, i * 32);
#pragma unroll
    for (uint32_t pair = 0; pair < 2; ++pair) {
      Operands<Traits::FormV::kTerms> x[2];
      words.template unpack<Traits::kManyRows>(table, pair, x);
#pragma unroll
      for (uint32_t term = 0; term < Traits::FormV::kTerms; ++term) {
        const uint32_t a[4] = {x[0].term[term][0], x[1].term[term][0], x[0].term[term][1],
                               x[1].term[term][1]};
#pragma unroll
        for (uint32_t four = 0; four < to.kRowQuads; ++four)
          mma_s8_u8(to.sums[four][2 * i + pair], a, to.weights[block][four][mma][0],
                    to.weights[block][four][mma][1]);
      }
    }
  }
}

template <class T>
inline uint32_t pack_two(float a, float b) {
  return from_float<T>(a).bits | static_cast<uint32_t>(from_float<T>(b).bits) << 16;
}

// The weights of a stage over 16-bit V as B fragments; bf16 ones have a lo part, too.
template <class Traits>
struct Float16Weights {
  static constexpr uint32_t kRowTiles = Float16Sums<Traits>::kRowTiles;
  static constexpr bool kLo = Traits::kV == kFormatBf16;
  using Type = Float16Type<Traits::kV>;
  uint32_t hi[kRowTiles][2], lo[kRowTiles][2];

  explicit Float16Weights(const typename SpreadV<Traits>::Scores& p) {
    using T = typename Type::type;
    const float up = kLo ? 1.0f : power_of_two(kProbabilityUp);
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles * 2; ++i) {
      const float a = p[i / 2][i % 2][0] * up, b = p[i / 2][i % 2][1] * up;
      const uint32_t x = hi[i / 2][i % 2] = pack_two<T>(a, b);
      if constexpr (kLo)
        lo[i / 2][i % 2] =
            pack_two<T>(a - __uint_as_float(x << 16), b - __uint_as_float(x & 0xFFFF0000u));
    }
  }
  void multiply(const uint32_t (&a)[4], uint32_t h, float (&to)[4]) const {
    if constexpr (kLo) Type::mma(to, a, lo[h][0], lo[h][1]);
    Type::mma(to, a, hi[h][0], hi[h][1]);
  }
};

// The V of a stage as A fragments of 16 coordinates: a lane has keys 2 j and 2 j + 1 of coordinates
// g and g + 8 in a[0] and a[1], keys 8 further on in a[2] and a[3].
template <class Traits>
struct Float16Values {
  static constexpr DecodePlane kPlane = Traits::kStage.v[0];
  const unsigned char* values;
  uint32_t swizzle, side;

  explicit Float16Values(const unsigned char* stage) {
    const uint32_t lane = threadIdx.x % kWarp, row = lane % 8 + lane / 16 * 8;
    values = stage + kPlane.offset + row / 8 * kPlane.tile_pitch + row % 8 * kPlane.row_pitch;
    swizzle = kPlane.bytes % 128 == 0 ? row % 8 : 0;
    side = lane / 8 % 2;
  }
  void load(uint32_t i, uint32_t (&a)[4]) const {
    ldmatrix_transposed(a, values + ((2 * i + side) ^ swizzle) * 16);
  }
};

template <class Traits>
inline void add_float16(const unsigned char* stage, const Float16Weights<Traits>& weights,
                        Float16Sums<Traits>& to) {
  const Float16Values<Traits> values(stage);
#pragma unroll
  for (uint32_t i = 0; i < Traits::kValueSlice / 16; ++i) {
    uint32_t a[4];
    values.load(i, a);
#pragma unroll
    for (uint32_t h = 0; h < to.kRowTiles; ++h) weights.multiply(a, h, to.sums[h][i]);
  }
}

// Rows [first, end), which see the same keys: `seen` has their bits of a[0] and a[2]. Values that
// they do not see are 0, and other rows' sums stay: a value that is not finite must not meet the
// weight 0 of a row that does not see it.
template <class Traits>
inline void add_float16_of(const unsigned char* stage, const Float16Weights<Traits>& weights,
                           const uint32_t (&seen)[2], uint32_t first, uint32_t end,
                           Float16Sums<Traits>& to) {
  const Float16Values<Traits> values(stage);
  const uint32_t column = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t i = 0; i < Traits::kValueSlice / 16; ++i) {
    uint32_t a[4];
    values.load(i, a);
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) a[e] &= seen[e / 2];
#pragma unroll
    for (uint32_t h = 0; h < to.kRowTiles; ++h) {
      float sums[4];
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) sums[e] = to.sums[h][i][e];
      weights.multiply(a, h, sums);
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const uint32_t row = 8 * h + column + e % 2;
        to.sums[h][i][e] = row >= first && row < end ? sums[e] : to.sums[h][i][e];
      }
    }
  }
}

}  // namespace gyre::cuda
