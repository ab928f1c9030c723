#pragma once
// The part of CUDA's driver API that Gyre uses, declared here so that a build needs no CUDA. A test
// compares it with cuda.h where that is installed.

#include <cstddef>
#include <cstdint>
#include <string>

namespace gyre::cuda {

using CuResult = int;
using CuDevice = int;
using CuAddress = unsigned long long;
using CuContext = struct CuContextTag*;
using CuStream = struct CuStreamTag*;
using CuEvent = struct CuEventTag*;
using CuModule = struct CuModuleTag*;
using CuFunction = struct CuFunctionTag*;
using CuGraph = struct CuGraphTag*;
using CuGraphExec = struct CuGraphExecTag*;
using CuGraphNode = struct CuGraphNodeTag*;

constexpr CuResult kCuSuccess = 0;
constexpr CuResult kCuInvalidValue = 1;
constexpr CuResult kCuOutOfMemory = 2;
constexpr CuResult kCuNoDevice = 100;
constexpr CuResult kCuEccUncorrectable = 214;
constexpr CuResult kCuNotReady = 600;
constexpr CuResult kCuIllegalAddress = 700;
constexpr CuResult kCuLaunchTimeout = 702;
constexpr CuResult kCuContextIsDestroyed = 709;
constexpr CuResult kCuAssert = 710;
constexpr CuResult kCuHardwareStackError = 714;
constexpr CuResult kCuIllegalInstruction = 715;
constexpr CuResult kCuMisalignedAddress = 716;
constexpr CuResult kCuInvalidAddressSpace = 717;
constexpr CuResult kCuInvalidPc = 718;
constexpr CuResult kCuLaunchFailed = 719;

using CuDeviceAttribute = int;
constexpr CuDeviceAttribute kCuMultiprocessors = 16;
constexpr CuDeviceAttribute kCuMemoryClockKhz = 36;
constexpr CuDeviceAttribute kCuMemoryBusBits = 37;
constexpr CuDeviceAttribute kCuL2Bytes = 38;
constexpr CuDeviceAttribute kCuCapabilityMajor = 75;
constexpr CuDeviceAttribute kCuCapabilityMinor = 76;
constexpr CuDeviceAttribute kCuSharedBytesPerMultiprocessor = 81;
constexpr CuDeviceAttribute kCuSharedBytesPerBlock = 97;  // with opt-in

using CuFunctionAttribute = int;
constexpr CuFunctionAttribute kCuMaxThreadsPerBlock = 0;
constexpr CuFunctionAttribute kCuStaticSharedBytes = 1;
constexpr CuFunctionAttribute kCuMaxDynamicSharedBytes = 8;

using CuCaptureStatus = int;
constexpr CuCaptureStatus kCuNotCapturing = 0;
constexpr CuCaptureStatus kCuCapturing = 1;

using CuGraphNodeType = int;
constexpr CuGraphNodeType kCuKernelNodeType = 0;

using CuPointerAttribute = int;
constexpr CuPointerAttribute kCuMemoryType = 2;
constexpr CuPointerAttribute kCuDeviceOrdinal = 9;

constexpr unsigned kCuDeviceMemory = 2;       // a memory type
constexpr unsigned kCuStreamNonBlocking = 1;  // does not wait for the default stream
constexpr unsigned kCuEventNoTiming = 2;

// How one node of a graph follows another: when the kernel has ended, or when all its blocks have
// said that the next may begin.
struct CuGraphEdge {
  unsigned char from_port, to_port, type, reserved[5];
};
constexpr CuGraphEdge kCuProgrammatic = {1, 0, 1, {}};

struct CuKernelNode {
  CuFunction function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** params;
  void** extra;
  void* kernel;
  CuContext context;
};

// The launch may begin when all blocks of the kernel ahead on its stream have said that it may.
struct CuLaunchAttribute {
  static constexpr int kProgrammaticSerialization = 6;

  int id = kProgrammaticSerialization;
  alignas(8) int value[16] = {1};
};
struct CuLaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CuStream stream;
  CuLaunchAttribute* attributes;
  unsigned attribute_count;
};

// member, symbol, parameters
#define GYRE_CUDA_DRIVER(F)                                                                 \
  F(init, cuInit, (unsigned flags))                                                         \
  F(driver_version, cuDriverGetVersion, (int* version))                                     \
  F(error_name, cuGetErrorName, (CuResult, const char**))                                   \
  F(error_text, cuGetErrorString, (CuResult, const char**))                                 \
  F(device_count, cuDeviceGetCount, (int* count))                                           \
  F(device_get, cuDeviceGet, (CuDevice*, int ordinal))                                      \
  F(device_name, cuDeviceGetName, (char* name, int bytes, CuDevice))                        \
  F(device_memory, cuDeviceTotalMem_v2, (size_t * bytes, CuDevice))                         \
  F(device_attribute, cuDeviceGetAttribute, (int* value, CuDeviceAttribute, CuDevice))      \
  F(context_retain, cuDevicePrimaryCtxRetain, (CuContext*, CuDevice))                       \
  F(context_release, cuDevicePrimaryCtxRelease_v2, (CuDevice))                              \
  F(context_push, cuCtxPushCurrent_v2, (CuContext))                                         \
  F(context_pop, cuCtxPopCurrent_v2, (CuContext*))                                          \
  F(memory_take, cuMemAlloc_v2, (CuAddress*, size_t bytes))                                 \
  F(memory_give, cuMemFree_v2, (CuAddress))                                                 \
  F(host_take, cuMemAllocHost_v2, (void**, size_t bytes))                                   \
  F(host_give, cuMemFreeHost, (void*))                                                      \
  F(copy_to_device, cuMemcpyHtoDAsync_v2, (CuAddress, const void*, size_t, CuStream))       \
  F(copy_to_host, cuMemcpyDtoHAsync_v2, (void*, CuAddress, size_t, CuStream))               \
  F(memory_set, cuMemsetD8Async, (CuAddress, unsigned char value, size_t bytes, CuStream))  \
  F(pointer_attribute, cuPointerGetAttribute, (void* value, CuPointerAttribute, CuAddress)) \
  F(stream_create, cuStreamCreate, (CuStream*, unsigned flags))                             \
  F(stream_destroy, cuStreamDestroy_v2, (CuStream))                                         \
  F(stream_synchronize, cuStreamSynchronize, (CuStream))                                    \
  F(stream_wait_event, cuStreamWaitEvent, (CuStream, CuEvent, unsigned flags))              \
  F(stream_is_capturing, cuStreamIsCapturing, (CuStream, CuCaptureStatus*))                 \
  F(event_create, cuEventCreate, (CuEvent*, unsigned flags))                                \
  F(event_destroy, cuEventDestroy_v2, (CuEvent))                                            \
  F(event_record, cuEventRecord, (CuEvent, CuStream))                                       \
  F(event_query, cuEventQuery, (CuEvent))                                                   \
  F(event_synchronize, cuEventSynchronize, (CuEvent))                                       \
  F(event_elapsed, cuEventElapsedTime, (float* milliseconds, CuEvent, CuEvent))             \
  F(module_load, cuModuleLoadData, (CuModule*, const void* image))                          \
  F(module_unload, cuModuleUnload, (CuModule))                                              \
  F(module_function, cuModuleGetFunction, (CuFunction*, CuModule, const char* name))        \
  F(function_get, cuFuncGetAttribute, (int* value, CuFunctionAttribute, CuFunction))        \
  F(function_set, cuFuncSetAttribute, (CuFunction, CuFunctionAttribute, int value))         \
  F(launch, cuLaunchKernelEx, (const CuLaunchConfig*, CuFunction, void** params, void**))   \
  F(graph_create, cuGraphCreate, (CuGraph*, unsigned flags))                                \
  F(graph_destroy, cuGraphDestroy, (CuGraph))                                               \
  F(graph_add_kernel, cuGraphAddKernelNode_v2,                                              \
    (CuGraphNode*, CuGraph, const CuGraphNode* after, size_t count, const CuKernelNode*))   \
  F(graph_node_type, cuGraphNodeGetType, (CuGraphNode, CuGraphNodeType*))                   \
  F(graph_instantiate, cuGraphInstantiateWithFlags,                                         \
    (CuGraphExec*, CuGraph, unsigned long long flags))                                      \
  F(graph_launch, cuGraphLaunch, (CuGraphExec, CuStream))                                   \
  F(graph_exec_destroy, cuGraphExecDestroy, (CuGraphExec))

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define GYRE_CUDA_MEMBER(member, symbol, params) CuResult(*member) params = nullptr;
  GYRE_CUDA_DRIVER(GYRE_CUDA_MEMBER)
#undef GYRE_CUDA_MEMBER

  // Programmatic dependent launch in graphs, since 12.3; null before.
  CuResult (*graph_add_edges)(CuGraph, const CuGraphNode* from, const CuGraphNode* to,
                              const CuGraphEdge*, size_t count) = nullptr;
  CuResult (*capture_info)(CuStream, CuCaptureStatus*, uint64_t* id, CuGraph*,
                           const CuGraphNode** after, const CuGraphEdge**, size_t* count) = nullptr;

  int version = 0;     // 12040 is 12.4
  std::string reason;  // why it cannot be used; empty: it can

  std::string describe(CuResult result) const;  // "CUDA_ERROR_X (text)"
};

// Opened and initialised on first use, then the same for the life of the process.
const Driver& driver();

}  // namespace gyre::cuda
