#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gyre/version.h"

#ifdef __cplusplus
extern "C" {
#endif

// Grows when a program compiled against an older header would no longer work. New functions, and
// new fields at the end of structs, do not change it.
#define GYRE_ABI_VERSION 2

GYRE_API uint32_t gyre_abi_version(void);  // of the library: compare it with GYRE_ABI_VERSION
GYRE_API const char* gyre_version(void);   // of the library: "0.2.0"

typedef int32_t gyre_status;
enum {
  GYRE_OK = 0,
  GYRE_INVALID_ARGUMENT = 1,
  GYRE_UNSUPPORTED = 2,
  GYRE_OUT_OF_MEMORY = 3,
  GYRE_COMPILE_FAILED = 4,
  GYRE_DEVICE_LOST = 5,
  GYRE_IO = 6,
  GYRE_INTERNAL = 7  // a mistake in the library
};

GYRE_API const char* gyre_status_name(gyre_status status);
// The message of the last call that failed in this thread. It lives until the next call fails in
// it; never NULL.
GYRE_API const char* gyre_last_error(void);

typedef int32_t gyre_dtype;  // 0 is none
enum {
  GYRE_F32 = 1,
  GYRE_F16 = 2,
  GYRE_BF16 = 3,
  GYRE_U8 = 4,
  GYRE_I32 = 5,
  GYRE_U32 = 6,
  GYRE_I64 = 7
};

typedef int32_t gyre_kv_format;  // 0 is none
enum {
  GYRE_KV_F32 = 1,
  GYRE_KV_F16 = 2,
  GYRE_KV_BF16 = 3,
  GYRE_KV_TQ2 = 16,
  GYRE_KV_TQ3 = 17,
  GYRE_KV_TQ4 = 18,
  GYRE_KV_TQ5 = 19,
  GYRE_KV_TQ6 = 20,
  GYRE_KV_TQ8 = 21,
  GYRE_KV_MLX_NATIVE4 = 32,
  GYRE_KV_MLX_NATIVE5 = 33,
  GYRE_KV_MLX_NATIVE6 = 34,
  GYRE_KV_MLX_NATIVE8 = 35
};

GYRE_API gyre_status gyre_kv_format_from_name(const char* name, gyre_kv_format* format);
GYRE_API gyre_status gyre_kv_format_name(gyre_kv_format format, const char** name);

typedef struct gyre_device gyre_device;
typedef struct gyre_tensor gyre_tensor;
typedef struct gyre_encoder gyre_encoder;
typedef struct gyre_fence gyre_fence;
typedef struct gyre_graph gyre_graph;
typedef struct gyre_kv_buffer gyre_kv_buffer;
typedef struct gyre_kv_pages gyre_kv_pages;
typedef struct gyre_kv_cache gyre_kv_cache;
typedef struct gyre_kv_pool gyre_kv_pool;
typedef struct gyre_kv_sequence gyre_kv_sequence;
typedef struct gyre_kv_batch gyre_kv_batch;

// Bytes that the library made: a page, a trace. A 0 follows the last.
typedef struct gyre_bytes gyre_bytes;
GYRE_API gyre_status gyre_bytes_get(const gyre_bytes* bytes, const void** data, uint64_t* size);
GYRE_API void gyre_bytes_destroy(gyre_bytes* bytes);

#ifdef __cplusplus
}
#endif
