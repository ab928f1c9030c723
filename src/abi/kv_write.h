#pragma once
// kv_write: tokens go to the slots that a list names, in pages. kv_page_copy: whole pages.
#include "abi/kv_quantize.h"

namespace gyre::abi {

struct KvWriteSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat, any
  uint8_t v_format;
  uint8_t slot_bytes;  // 4 or 8: i32 or i64
  uint8_t coded;       // streams whose source is coded rows: 1 K, 2 V
  uint8_t unused[3];
};

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
