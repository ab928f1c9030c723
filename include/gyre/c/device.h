#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_device_options {
  uint64_t size;
  uint32_t threads;  // CPU; 0: GYRE_THREADS, else every usable core
  uint32_t spin_us;  // CPU; if has_spin_us, else 50
  int32_t has_spin_us;
  int32_t has_pool_limit;
  uint64_t pool_limit_bytes;  // if has_pool_limit, else 256 MiB on the CPU, no limit on a GPU
  const char* kernel_cache;   // CUDA: a folder, or "off"; NULL: the usual one
  int32_t check_each_launch;  // CUDA
  int32_t reserved;
} gyre_device_options;

// `name`: "cpu", "cuda:0", ...
GYRE_API gyre_status gyre_device_open(const char* name, const gyre_device_options* options,
                                      gyre_device** device);
GYRE_API void gyre_device_destroy(gyre_device* device);

typedef struct gyre_device_info {
  uint64_t size;
  const char* name;
  const char* reason;  // why it is not available; empty where it is
  const char* description;
  uint64_t memory_bytes;
  uint32_t compute_units;
  int32_t available;
} gyre_device_info;

// The strings live as long as the handle that was asked.
GYRE_API gyre_status gyre_device_get_info(const gyre_device* device, gyre_device_info* info);

typedef struct gyre_device_list gyre_device_list;
GYRE_API gyre_status gyre_device_list_create(gyre_device_list** list);
GYRE_API gyre_status gyre_device_list_size(const gyre_device_list* list, uint64_t* count);
GYRE_API gyre_status gyre_device_list_get(const gyre_device_list* list, uint64_t index,
                                          gyre_device_info* info);
GYRE_API void gyre_device_list_destroy(gyre_device_list* list);

typedef struct gyre_memory_use {
  uint64_t size;
  uint64_t in_use_bytes;
  uint64_t cached_bytes;
  uint64_t system_allocations;
  uint64_t reuses;
} gyre_memory_use;

GYRE_API gyre_status gyre_device_memory(const gyre_device* device, gyre_memory_use* use);
GYRE_API gyre_status gyre_device_trim(const gyre_device* device);
GYRE_API gyre_status gyre_device_wait(const gyre_device* device);
GYRE_API gyre_status gyre_device_stream(const gyre_device* device, uint64_t* stream);

typedef int32_t gyre_trace_format;
enum { GYRE_TRACE_TEXT = 0, GYRE_TRACE_TABLE = 1, GYRE_TRACE_CHROME = 2 };

GYRE_API gyre_status gyre_device_start_trace(const gyre_device* device);
GYRE_API gyre_status gyre_device_stop_trace(const gyre_device* device, gyre_trace_format format,
                                            gyre_bytes** trace);

#ifdef __cplusplus
}
#endif
