#pragma once
// The data structures of DLPack 1.1 (https://dmlc.github.io/dlpack), which other libraries read and
// write as they stand here.

#include <cstdint>

namespace gyre::python {

// Device types.
constexpr int32_t kDLCPU = 1, kDLCUDA = 2;
constexpr int32_t kDLCUDAHost = 3;  // memory of the host, pinned

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

// Type codes.
constexpr uint8_t kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6;

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

constexpr uint32_t kDLMajor = 1, kDLMinor = 1;
constexpr uint64_t kDLFlagReadOnly = 1;

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};

// DLPack 1.3's fast exchange: a table of C functions that a type has in its attribute
// __dlpack_c_exchange_api__, a capsule of this name. Functions return 0, or set a Python error.
constexpr const char* kDLExchangeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kDLExchangeCapsule = "dlpack_exchange_api";

struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;
};

struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  void* managed_tensor_allocator;
  int (*managed_tensor_from_py_object_no_sync)(void* object, DLManagedTensorVersioned** out);
  void* managed_tensor_to_py_object_no_sync;
  void* dltensor_from_py_object_no_sync;
  void* current_work_stream;
};

}  // namespace gyre::python
