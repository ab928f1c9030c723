// Our own declarations of CUDA's functions against its headers, and what is said without a driver.
#include <type_traits>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernel.h"
#include "cuda/nvrtc.h"
#include "expect_error.h"
#include "gyre_test.h"

#if __has_include(<cuda.h>) && __has_include(<nvrtc.h>)
#define GYRE_HAVE_CUDA_HEADERS 1
#include <cuda.h>
#include <nvrtc.h>
#else
#define GYRE_HAVE_CUDA_HEADERS 0
#endif

namespace gyre::cuda {
namespace {

#if GYRE_HAVE_CUDA_HEADERS

// Handles are pointers there and here, enumerations integers.
template <class A, class B>
constexpr bool same_value() {
  constexpr bool kPointers = std::is_pointer_v<A> && std::is_pointer_v<B>;
  constexpr bool kIntegerA = std::is_integral_v<A> || std::is_enum_v<A>;
  constexpr bool kIntegerB = std::is_integral_v<B> || std::is_enum_v<B>;
  // NOLINTNEXTLINE(bugprone-sizeof-expression): of pointers, too
  return sizeof(A) == sizeof(B) && (kPointers || (kIntegerA && kIntegerB) || std::is_same_v<A, B>);
}

template <class A, class B>
struct SameCall : std::false_type {};
template <class A, class... As, class B, class... Bs>
requires(sizeof...(As) == sizeof...(Bs)) struct SameCall<A (*)(As...), B (*)(Bs...)>
    : std::bool_constant<same_value<A, B>() && (same_value<As, Bs>() && ...)> {
};

#define GYRE_CUDA_SAME(member, symbol, params) \
  static_assert(SameCall<decltype(Driver::member), decltype(&::symbol)>::value, #symbol);
GYRE_CUDA_DRIVER(GYRE_CUDA_SAME)
#undef GYRE_CUDA_SAME
#define GYRE_CUDA_SAME(member, symbol, params) \
  static_assert(SameCall<decltype(Nvrtc::member), decltype(&::symbol)>::value, #symbol);
GYRE_CUDA_NVRTC(GYRE_CUDA_SAME)
#undef GYRE_CUDA_SAME

static_assert(sizeof(CuKernelNode) == sizeof(CUDA_KERNEL_NODE_PARAMS_v2));
static_assert(offsetof(CuKernelNode, grid) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, gridDimX));
static_assert(offsetof(CuKernelNode, block) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, blockDimX));
static_assert(offsetof(CuKernelNode, shared_bytes) ==
              offsetof(CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes));
static_assert(offsetof(CuKernelNode, params) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, kernelParams));
static_assert(offsetof(CuKernelNode, extra) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, extra));
static_assert(offsetof(CuKernelNode, kernel) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, kern));
static_assert(offsetof(CuKernelNode, context) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, ctx));

#if CUDA_VERSION >= 12030
static_assert(sizeof(CuGraphEdge) == sizeof(CUgraphEdgeData));
static_assert(offsetof(CuGraphEdge, from_port) == offsetof(CUgraphEdgeData, from_port));
static_assert(offsetof(CuGraphEdge, type) == offsetof(CUgraphEdgeData, type));
static_assert(kCuProgrammatic.from_port == CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC);
static_assert(kCuProgrammatic.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
using AddEdges = CUresult (*)(CUgraph, const CUgraphNode*, const CUgraphNode*,
                              const CUgraphEdgeData*, size_t);
static_assert(SameCall<decltype(Driver::graph_add_edges), AddEdges>::value);
using CaptureInfo = CUresult (*)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                 const CUgraphNode**, const CUgraphEdgeData**, size_t*);
static_assert(SameCall<decltype(Driver::capture_info), CaptureInfo>::value);
#endif

static_assert(sizeof(CuLaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(CuLaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(CuLaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(CuLaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(CuLaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(CuLaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(CuLaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(CuLaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(CuLaunchAttribute::kProgrammaticSerialization ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

#define GYRE_CUDA_SAME(ours, theirs) \
  static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
GYRE_CUDA_SAME(kCuSuccess, CUDA_SUCCESS);
GYRE_CUDA_SAME(kCuInvalidValue, CUDA_ERROR_INVALID_VALUE);
GYRE_CUDA_SAME(kCuOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
GYRE_CUDA_SAME(kCuNoDevice, CUDA_ERROR_NO_DEVICE);
GYRE_CUDA_SAME(kCuEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE);
GYRE_CUDA_SAME(kCuNotReady, CUDA_ERROR_NOT_READY);
GYRE_CUDA_SAME(kCuIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
GYRE_CUDA_SAME(kCuLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
GYRE_CUDA_SAME(kCuContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
GYRE_CUDA_SAME(kCuAssert, CUDA_ERROR_ASSERT);
GYRE_CUDA_SAME(kCuHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR);
GYRE_CUDA_SAME(kCuIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION);
GYRE_CUDA_SAME(kCuMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS);
GYRE_CUDA_SAME(kCuInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE);
GYRE_CUDA_SAME(kCuInvalidPc, CUDA_ERROR_INVALID_PC);
GYRE_CUDA_SAME(kCuLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
GYRE_CUDA_SAME(kCuMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
GYRE_CUDA_SAME(kCuMemoryClockKhz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
GYRE_CUDA_SAME(kCuMemoryBusBits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
GYRE_CUDA_SAME(kCuL2Bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
GYRE_CUDA_SAME(kCuCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
GYRE_CUDA_SAME(kCuCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
GYRE_CUDA_SAME(kCuSharedBytesPerMultiprocessor,
               CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
GYRE_CUDA_SAME(kCuSharedBytesPerBlock, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
GYRE_CUDA_SAME(kCuMaxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
GYRE_CUDA_SAME(kCuStaticSharedBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
GYRE_CUDA_SAME(kCuMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
GYRE_CUDA_SAME(kCuKernelNodeType, CU_GRAPH_NODE_TYPE_KERNEL);
GYRE_CUDA_SAME(kCuMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
GYRE_CUDA_SAME(kCuDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
GYRE_CUDA_SAME(kCuDeviceMemory, CU_MEMORYTYPE_DEVICE);
GYRE_CUDA_SAME(kCuStreamNonBlocking, CU_STREAM_NON_BLOCKING);
GYRE_CUDA_SAME(kCuEventNoTiming, CU_EVENT_DISABLE_TIMING);
GYRE_CUDA_SAME(kNvrtcSuccess, NVRTC_SUCCESS);
#undef GYRE_CUDA_SAME

TEST(CudaDeclarations, AgreeWithTheHeaders) { SUCCEED() << "they compile"; }

#else

TEST(CudaDeclarations, AgreeWithTheHeaders) { GTEST_SKIP() << "cuda.h is not installed here"; }

#endif

TEST(CudaDevices, AreListedOrTheReasonIs) {
  const std::vector<DeviceInfo> all = list_devices();
  ASSERT_FALSE(all.empty());
  for (const DeviceInfo& info : all) EXPECT_EQ(info.available, info.reason.empty()) << info.name;
  if (driver().reason.empty()) GTEST_SKIP() << "there is a driver here";
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].name, "cuda");
  EXPECT_EQ(all[0].reason, driver().reason);
  for (const char* name : {"cuda", "cuda:0", "cuda:3"}) {
    EXPECT_TRUE(test::throws_error(ErrorCode::unsupported, {"device.open", name, driver().reason},
                                   [&] { Device::open(name); }));
  }
}

TEST(CudaDevices, HaveNumbers) {
  for (const char* name : {"cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "cuda:99999999999"}) {
    EXPECT_TRUE(test::refused({"device.open", name}, [&] { Device::open(name); })) << name;
  }
}

}  // namespace
}  // namespace gyre::cuda
