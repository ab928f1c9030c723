#pragma once
// What of ggml's structures this library reads or writes, declared here so that no header of ggml
// is needed. host.cpp checks them against the running ggml before anything is used;
// layout_check.cpp compares them with ggml's headers where these are at hand (make llama).

#include <cstddef>
#include <cstdint>

namespace gyre::ggml::abi {

constexpr int kBackendApiVersion = 2;
constexpr size_t kMaxDims = 4, kMaxSources = 10, kOpParamBytes = 64, kNameBytes = 64;
constexpr int kAllThreads = -1;  // GGML_N_TASKS_MAX

enum DeviceType : int { device_cpu = 0, device_gpu = 1, device_igpu = 2, device_accel = 3 };
enum Status : int { status_failed = -1, status_success = 0 };

struct Buffer;
struct BufferType;
struct Graph;
struct Backend;
struct Device;
struct Registry;

struct Tensor {
  int type;
  Buffer* buffer;
  int64_t ne[kMaxDims];
  size_t nb[kMaxDims];
  int op;
  int32_t op_params[kOpParamBytes / 4];
  int32_t flags;
  Tensor* src[kMaxSources];
  Tensor* view_src;
  size_t view_offs;
  void* data;
  char name[kNameBytes];
  void* extra;
  char padding[8];
};
constexpr size_t kTensorOverhead = sizeof(Tensor) + 32;  // what ggml_tensor_overhead() returns

// What op_params of a CUSTOM node hold.
struct CustomOp {
  void (*run)(Tensor* node, int thread, int threads, void* data);
  int tasks;
  void* data;
};

using ComputeGraph = Status (*)(Backend*, Graph*);

struct BackendTable {
  const char* (*get_name)(Backend*);
  void (*free)(Backend*);
  void* optional[6];  // asynchronous copies, synchronize: the CPU backend has none
  void* plan_create;
  void* plan_free;
  void* plan_update;  // none
  void* plan_compute;
  ComputeGraph graph_compute;
  void* events[2];       // none
  void* graph_optimize;  // none
};
struct Backend {
  void* guid;
  BackendTable table;
  Device* device;
  void* context;
};

struct DeviceProps;  // larger in newer versions: only the CPU device fills it
struct DevicePropsHead {
  const char* name;
  const char* description;
  size_t memory_free, memory_total;
  int type;
};

struct DeviceTable {
  const char* (*get_name)(Device*);
  const char* (*get_description)(Device*);
  void (*get_memory)(Device*, size_t* free, size_t* total);
  int (*get_type)(Device*);
  void (*get_props)(Device*, DeviceProps*);
  Backend* (*init_backend)(Device*, const char* params);
  BufferType* (*get_buffer_type)(Device*);
  BufferType* (*get_host_buffer_type)(Device*);  // none
  Buffer* (*buffer_from_host_ptr)(Device*, void*, size_t size, size_t max_tensor_size);
  bool (*supports_op)(Device*, const Tensor*);
  bool (*supports_buft)(Device*, BufferType*);
  bool (*offload_op)(Device*, const Tensor*);  // none
  void* events[3];                             // none
};
struct Device {
  DeviceTable table;
  Registry* registry;
  void* context;
};

struct RegistryTable {
  const char* (*get_name)(Registry*);
  size_t (*get_device_count)(Registry*);
  Device* (*get_device)(Registry*, size_t index);
  void* (*get_proc_address)(Registry*, const char* name);
};
struct Registry {
  int api_version;
  RegistryTable table;
  void* context;
};

}  // namespace gyre::ggml::abi
