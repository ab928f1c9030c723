#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_custom_kernel gyre_custom_kernel;

typedef int32_t gyre_access;
enum { GYRE_READ = 0, GYRE_WRITE = 1, GYRE_READ_WRITE = 2 };

typedef struct gyre_custom_arg {
  uint64_t size;
  const char* name;    // in errors
  gyre_access access;  // 0: read
  int32_t reserved;
} gyre_custom_arg;

// One of `tasks` tasks, in any order and in any thread. `params` is what was recorded, args[i] the
// address of argument i, 0 if it is absent. It must return: no exceptions, no longjmp.
typedef void (*gyre_custom_task)(const void* params, const uint64_t* args, uint32_t task,
                                 uint32_t tasks);

// Everything but the function is copied.
typedef struct gyre_custom_code {
  uint64_t size;
  const char* name;             // in traces and errors
  const gyre_custom_arg* args;  // 1 to 16
  uint64_t arg_count;
  uint64_t params_bytes;     // 1 to 1024
  gyre_custom_task cpu;      // NULL: not on the CPU
  const char* cuda_source;   // NULL: not on CUDA
  const char* cuda_name;     // the kernel in it; NULL if there is no source
  const char* metal_source;  // NULL: not on Metal
  const char* metal_name;    // the kernel in it; NULL if there is no source
} gyre_custom_code;

GYRE_API gyre_status gyre_custom_kernel_create(const gyre_custom_code* code,
                                               gyre_custom_kernel** kernel);
// What was recorded goes on.
GYRE_API void gyre_custom_kernel_destroy(gyre_custom_kernel* kernel);
GYRE_API gyre_status gyre_supports_custom_kernel(const gyre_device* device,
                                                 const gyre_custom_kernel* kernel,
                                                 int32_t* supported);

typedef struct gyre_custom_call {
  uint64_t size;
  // Copied. A pointer in them is the kernel's user data: what it points to must live until nothing
  // that was recorded can run any more.
  const void* params;
  uint64_t params_bytes;
  const gyre_tensor* const* args;  // in the order of the code's; NULL: absent
  uint64_t arg_count;
  uint32_t tasks;         // CPU; 0: nothing to do
  uint32_t grid[3];       // CUDA: blocks, Metal: threadgroups; x 0: nothing to do; y, z 0: 1
  uint32_t block;         // threads of each; 0: 128
  uint32_t shared_bytes;  // their dynamic shared or threadgroup memory
} gyre_custom_call;

GYRE_API gyre_status gyre_custom_kernel_record(const gyre_custom_kernel* kernel,
                                               gyre_encoder* encoder, const gyre_custom_call* call);

#ifdef __cplusplus
}
#endif
