#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// What the header of a snapshot says; no more of the file is read.
typedef struct gyre_kv_snapshot_info {
  uint64_t size;
  uint64_t version;
  uint64_t kv_heads;  // this and the next two: 0 where layers differ
  uint64_t head_dim;
  uint64_t v_head_dim;
  uint64_t capacity;
  uint64_t layer_count;
  uint64_t step_tokens;
  uint64_t length;
  uint64_t file_bytes;
  uint64_t calibration;  // which calibration the rows were written with; 0: none
} gyre_kv_snapshot_info;

GYRE_API gyre_status gyre_kv_snapshot_inspect(const char* path, gyre_kv_snapshot_info* info);
// Reads the whole file and refuses one with a single wrong bit.
GYRE_API gyre_status gyre_kv_snapshot_verify(const char* path);

#ifdef __cplusplus
}
#endif
