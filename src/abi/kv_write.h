#pragma once
// kv_write: tokens go to the slots that a list names, in pages. kv_page_copy: whole pages.
#include "abi/kv_codec.h"
#include "abi/kv_quantize.h"

namespace gyre::abi {

struct KvWriteSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat, any
  uint8_t v_format;
  uint8_t slot_bytes;  // 4 or 8: i32 or i64
  uint8_t calibrated;  // streams whose source is calibrated rows: 1 K, 2 V
  uint8_t lane_quads;  // few tokens: kv_lane_quads; 0: many
  uint8_t unused[2];
};

// A list of few slots is looked through for every row of every token. A command takes at most
// kWriteMaxTokens; the next one has the tokens behind them.
GYRE_CONSTANT uint64_t kWriteFewTokens = 256, kWriteMaxTokens = 2048;

// Few tokens are too little work for a worker to each tile: rows are. A row of K or V has 32 lanes,
// each with this many times four coordinates: 1, 2 or 4. 0: rows that are written in tiles only.
struct KvRowShape {
  uint32_t k_format, v_format;  // KvFormat
  uint64_t k_dim, v_dim;
};
constexpr uint32_t kv_lane_quads(const KvRowShape rows) {
  if (kv_is_mlx_native(rows.k_format) || kv_is_mlx_native(rows.v_format)) return 0;
  const uint64_t dim = rows.k_dim > rows.v_dim ? rows.k_dim : rows.v_dim;
  if (rows.k_dim % 4 != 0 || rows.v_dim % 4 != 0 || dim > 512) return 0;
  return dim <= 128 ? 1 : (dim <= 256 ? 2 : 4);
}

// Slot s is slot s % page_tokens of page s / page_tokens; its bytes begin page * page_stride behind
// those of page 0. Slots are device data and may be anything.
struct KvWriteParams {
  uint64_t tokens;
  uint64_t heads;
  uint64_t pages;
  uint64_t page_stride;
  uint32_t page_tokens;
  uint32_t unused;
  KvQuantizeStream stream[2];  // K, V; places in a page
};

struct KvPageCopySpec {
  uint8_t unused[8];
};

struct KvPageCopyParams {
  uint64_t count;
  uint64_t pages;
  uint64_t page_stride;
  uint64_t page_bytes;
};

}  // namespace gyre::abi
