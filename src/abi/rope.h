#pragma once
// rope: pairs of coordinates turn by position * frequency. A frequency is a 64-bit fraction of a
// turn, so the product with an integer position wraps at whole turns by itself: no range reduction,
// exact at any position.
#include "abi/types.h"

namespace gyre::abi {

struct RopeSpec {
  uint8_t x_dtype;  // DType
  uint8_t out_dtype;
  uint8_t adjacent;  // 1: pairs are (2i, 2i + 1)
  uint8_t norm;      // 1: RMS norm first
  uint8_t unused[4];
};

GYRE_CONSTANT uint32_t kRopeTurns = 0;    // frequencies are u64 fractions of a turn
GYRE_CONSTANT uint32_t kRopeRadians = 1;  // f32 radians

GYRE_CONSTANT uint32_t kRopeNoDtype = 0xFF;

// Strides in bytes.
struct RopeStream {
  uint64_t heads;
  uint64_t x_token_stride, x_head_stride;
  uint64_t out_token_stride, out_head_stride;
  uint64_t second_token_stride, second_head_stride;
  uint32_t second_dtype;  // DType or kRopeNoDtype
  uint32_t weight_dtype;
};

struct RopeParams {
  uint64_t tokens;
  uint64_t head_dim;
  uint64_t blocks;        // independent parts of a head: 2 for vision_2d, else 1
  uint64_t block_pairs;   // pairs in each
  uint64_t distance;      // split-half: from a coordinate to its partner
  uint64_t block_stride;  // coordinates from one part to the next
  uint64_t position_axis_stride, position_token_stride;  // elements
  uint32_t position_signed;
  uint32_t mode;  // RopeMode
  uint32_t sections[4];
  uint32_t frequency_kind;
  uint32_t streams;  // 1: x, 2: x and k
  float magnitude;
  float epsilon;
  float weight_offset;
  uint32_t unused;
  RopeStream stream[2];
};

GYRE_CONSTANT uint64_t kRopeMaxHeadDim = 2048;
GYRE_CONSTANT uint64_t kRopeMaxPairs = kRopeMaxHeadDim / 2;

// Position axis of pair p (the axes of mlx-native, and of the engines whose modes RopeMode
// numbers).
inline uint32_t rope_axis(const GYRE_PARAMS RopeParams& params, uint32_t pair) {
  const GYRE_PARAMS uint32_t* s = params.sections;
  if (params.mode == 0) return 0;
  if (params.mode == 2) return pair < params.block_pairs ? 0 : 1;
  if (params.mode == 24) {
    const uint32_t sum = s[0] + s[1];
    return pair % (sum != 0 ? sum : 1) < s[0] ? 0 : 1;
  }
  const uint32_t sum = s[0] + s[1] + s[2] + s[3];
  const uint32_t sector = pair % (sum != 0 ? sum : 1);
  if (params.mode == 40) {
    const uint32_t axis = sector % 3;
    return sector < 3 * s[axis] ? axis : 3;
  }
  if (sector < s[0]) return 0;
  if (sector < s[0] + s[1]) return 1;
  return sector < s[0] + s[1] + s[2] ? 2 : 3;
}

}  // namespace gyre::abi
