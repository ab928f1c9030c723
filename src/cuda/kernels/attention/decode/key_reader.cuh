#pragma once
// Decode attention: which coordinates of a key a lane reads from a stage, and in which order they
// become operands. A dot product does not depend on the order of coordinates: each lane reads its
// share of a key in wide loads, and the queries are arranged to match.
#include "cuda/kernels/attention/decode/problem.cuh"

namespace gyre::cuda {

template <uint32_t kWords>
inline void load_shared_words(const unsigned char* from, uint32_t* w) {
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

// Reads V in levels: tile j, from coordinate 4 g on.
template <uint32_t kFormat>
inline uint32_t values_offset(const DecodePlane (&planes)[2], uint32_t plane) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const DecodePlane& p = planes[plane];
  const uint32_t bits = plane == 0 ? abi::kv_low_bits(kFormat) : abi::kv_high_bits(kFormat);
  return p.offset + j * p.tile_pitch + 4 * g * bits;
}

}  // namespace gyre::cuda
