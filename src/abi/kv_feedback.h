#pragma once
// kv_feedback: rows become calibrated rows, in a calibrated basis and with the error of each
// coordinate fed into those after it. kv_transform: rows times a matrix. docs/kv_formats.md,
// "Calibrated rows", has the arithmetic; its order is part of the format.
#include "abi/kv_codec.h"

namespace gyre::abi {

GYRE_CONSTANT uint32_t kKvMaxGains = 8;
GYRE_CONSTANT uint32_t kKvMaxCalibratedDim = 512;

// Head dims that calibrated rows have: one transform, in one or two scale blocks.
constexpr bool kv_takes_calibration(uint64_t head_dim) {
  return head_dim >= 16 && head_dim <= kKvMaxCalibratedDim && (head_dim & (head_dim - 1)) == 0;
}

// The scale blocks of such a row are alike.
constexpr uint32_t kv_calibrated_block(uint32_t head_dim) {
  return head_dim < kKvScaleBlock ? head_dim : kKvScaleBlock;
}

// A calibrated row: the row in its basis as f16, the codes, a byte a coordinate, a scale (16 bits)
// for each scale block.
constexpr uint64_t kv_calibrated_codes(uint64_t head_dim) { return 2 * head_dim; }
constexpr uint64_t kv_calibrated_scale(uint64_t head_dim) { return 3 * head_dim; }
constexpr uint64_t kv_calibrated_bytes(uint64_t head_dim) { return 3 * head_dim + 16; }

struct KvFeedbackSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // native KvFormat; 0: no K
  uint8_t v_format;
  uint8_t unused[5];
};

// Strides in bytes; calibrated rows lie one behind the other, [tokens, heads]. Matrices are f32
// [heads, head_dim, head_dim], vectors f32 [heads, head_dim], contiguous.
struct KvFeedbackStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  uint32_t head_dim;  // 0: the stream is not there
  uint32_t format;
  uint32_t gains;  // how many
  uint32_t unused;
  float gain[kKvMaxGains];
};

struct KvFeedbackParams {
  uint64_t tokens;
  uint64_t heads;
  KvFeedbackStream stream[2];  // K, V
};

struct KvTransformSpec {
  uint8_t x_dtype;    // DType
  uint8_t out_dtype;  // DType
  uint8_t unused[6];
};

// out = matrix (x - before) + after, a matrix to `group` heads.
struct KvTransformParams {
  uint64_t tokens;
  uint64_t heads;
  uint64_t x_token_stride;
  uint64_t x_head_stride;
  uint64_t out_token_stride;
  uint64_t out_head_stride;
  uint32_t head_dim;
  uint32_t group;
};

}  // namespace gyre::abi
