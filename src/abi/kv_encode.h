#pragma once
// kv_encode: rows become coded rows, in a calibrated basis and with the error of each coordinate
// fed into those after it. kv_basis: rows times a matrix. docs/kv_formats.md, "Coded rows", has the
// arithmetic; its order is part of the format.
#include "abi/kv_codec.h"

namespace gyre::abi {

GYRE_CONSTANT uint32_t kKvMostGains = 8;
GYRE_CONSTANT uint32_t kKvMostCodedDim = kKvScaleBlock;

// Head dims that coded rows have: one transform, one scale.
constexpr bool kv_takes_coding(uint64_t head_dim) {
  return head_dim >= 16 && head_dim <= kKvMostCodedDim && (head_dim & (head_dim - 1)) == 0;
}

// A coded row: the row in its basis as f16, the codes, a byte a coordinate, the scale (16 bits).
constexpr uint64_t kv_coded_codes(uint64_t head_dim) { return 2 * head_dim; }
constexpr uint64_t kv_coded_scale(uint64_t head_dim) { return 3 * head_dim; }
constexpr uint64_t kv_coded_bytes(uint64_t head_dim) { return 3 * head_dim + 16; }

struct KvEncodeSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // native KvFormat; 0: no K
  uint8_t v_format;
  uint8_t unused[5];
};

// Strides in bytes; coded rows lie one behind the other, [tokens, heads]. Matrices are f32 [heads,
// head_dim, head_dim], vectors f32 [heads, head_dim], contiguous.
struct KvEncodeStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  uint32_t head_dim;  // 0: the stream is not there
  uint32_t format;
  uint32_t gains;  // how many
  uint32_t unused;
  float gain[kKvMostGains];
};

struct KvEncodeParams {
  uint64_t tokens;
  uint64_t heads;
  KvEncodeStream stream[2];  // K, V
};

struct KvBasisSpec {
  uint8_t x_dtype;    // DType
  uint8_t out_dtype;  // DType
  uint8_t unused[6];
};

// out = matrix (x - before) + after, a matrix to `group` heads.
struct KvBasisParams {
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
