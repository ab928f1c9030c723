#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GYRE_MAX_RANK 6

// Contiguous, zero-filled. `shape` may be NULL where rank is 0.
GYRE_API gyre_status gyre_tensor_create(const gyre_device* device, gyre_dtype dtype, uint32_t rank,
                                        const uint64_t* shape, gyre_tensor** tensor);

// Memory of the caller's: of the host, or an address of the device.
typedef struct gyre_memory {
  uint64_t size;
  void* data;
  const uint64_t* shape;    // one entry per dimension
  const uint64_t* strides;  // in elements; NULL: contiguous
  // Called with `context` once nothing uses the memory any more, in whatever thread that is; NULL:
  // the memory outlives every tensor and command that uses it. Not called if the call is refused.
  void (*release)(void* context);
  void* context;
  gyre_dtype dtype;
  uint32_t rank;
  int32_t read_only;
  int32_t reserved;
} gyre_memory;

GYRE_API gyre_status gyre_tensor_wrap(const gyre_device* device, const gyre_memory* memory,
                                      gyre_tensor** tensor);
GYRE_API void gyre_tensor_destroy(gyre_tensor* tensor);

typedef struct gyre_tensor_info {
  uint64_t size;
  gyre_dtype dtype;
  uint32_t rank;
  uint64_t shape[GYRE_MAX_RANK];
  uint64_t strides[GYRE_MAX_RANK];  // in elements
  uint64_t elements;
  uint64_t bytes;
  uint64_t address;  // of the first element, as the device sees it
  int32_t read_only;
  int32_t contiguous;
} gyre_tensor_info;

GYRE_API gyre_status gyre_tensor_get_info(const gyre_tensor* tensor, gyre_tensor_info* info);

// Views: new handles of the same memory.
GYRE_API gyre_status gyre_tensor_slice(const gyre_tensor* tensor, uint32_t dim, uint64_t begin,
                                       uint64_t count, gyre_tensor** view);
GYRE_API gyre_status gyre_tensor_permute(const gyre_tensor* tensor, uint32_t rank,
                                         const uint64_t* order, gyre_tensor** view);
GYRE_API gyre_status gyre_tensor_reshape(const gyre_tensor* tensor, uint32_t rank,
                                         const uint64_t* shape, gyre_tensor** view);

typedef struct gyre_strided_view {
  uint64_t size;
  const uint64_t* shape;    // one entry per dimension
  const uint64_t* strides;  // in elements, one entry per dimension
  uint64_t offset_elements;
  uint32_t rank;
  int32_t reserved;
} gyre_strided_view;

GYRE_API gyre_status gyre_tensor_strided(const gyre_tensor* tensor, const gyre_strided_view* layout,
                                         gyre_tensor** view);

// The elements in host memory, of contiguous tensors that the host can see. Submitted work that
// uses them must be done.
GYRE_API gyre_status gyre_tensor_data(const gyre_tensor* tensor, void** data);
GYRE_API gyre_status gyre_tensor_const_data(const gyre_tensor* tensor, const void** data);
// Copies all elements in row-major order; `bytes` must be the tensor's.
GYRE_API gyre_status gyre_tensor_write(const gyre_tensor* tensor, const void* source,
                                       uint64_t bytes);
GYRE_API gyre_status gyre_tensor_read(const gyre_tensor* tensor, void* target, uint64_t bytes);

#ifdef __cplusplus
}
#endif
