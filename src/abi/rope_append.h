#pragma once
// rope_append: q is rotated, k is rotated and written to a cache, v is written as it is.
#include "abi/rope.h"
#include "abi/write.h"

namespace gyre::abi {

struct RopeAppendSpec {
  uint8_t dtype;     // DType of q, k, v and q's output; k is rounded to it before it is stored
  uint8_t k_format;  // KvFormat, any
  uint8_t v_format;
  uint8_t adjacent;    // 1: pairs are (2i, 2i + 1)
  uint8_t norm;        // 1: RMS norm of q and k first
  uint8_t slot_bytes;  // 0: a cache's state; 4 or 8: slots, i32 or i64
  uint8_t lane_quads;  // few tokens: kv_lane_quads; 0: a device may have no kernel
  uint8_t unused;
};

// rope.stream[0] is q, rope.stream[1] is k; rope.streams is 1, or 0 without q.
struct RopeAppendParams {
  RopeParams rope;
  WriteParams write;  // to a state or to slots
};

// At most kWriteFewTokens.
GYRE_CONSTANT uint64_t kRopeFewTokens = 32;

}  // namespace gyre::abi
