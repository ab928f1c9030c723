// A libcuda.so.1 for machines without a GPU: memory is the host's, work is done at once. Linked
// with instances of the kernels' text (cuda_host/kernels) it runs them; else the only kernels are
// bytes_copy and those that do nothing, for tests of the runtime.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "fake_graph.h"
#include "fake_run.h"
#include "fake_state.h"
#include "fake_streams.h"

namespace {

using namespace gyre::cuda;
using namespace gyre::test;

struct Stream {
  Graph* captured = nullptr;
  uint64_t capture = 0;
  std::shared_ptr<FakeLine> line = std::make_shared<FakeLine>();
};
struct Event {
  FakeMoment moment;
};
thread_local Graph* asked_graph = nullptr;  // by cuStreamGetCaptureInfo

// A driver says so when the host has no memory for what it keeps.
template <class Work>
CuResult taking_memory(const Work& work) {
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      return kCuSuccess;
    } else {
      return work();
    }
  } catch (const std::bad_alloc&) {
    return kCuOutOfMemory;
  }
}

template <class To, class From>
To as(From* from) {
  return reinterpret_cast<To>(from);
}

template <class Made, class Handle>
CuResult make(Handle* handle) {
  return taking_memory([&] { *handle = as<Handle>(new Made); });
}

CuResult state() {
  const std::lock_guard lock(mutex);
  return sticky;
}

}  // namespace

// Names and parameters are those of the table in cuda/driver.h.
// NOLINTBEGIN(readability-identifier-naming, readability-function-size)
extern "C" {

CuResult cuInit(unsigned) {
  user = getpid();
  return kCuSuccess;
}
// NVRTC asks for it and does not check that it is there.
CuResult cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return kCuInvalidValue;
}
CuResult cuDriverGetVersion(int* version) {
  *version = 13000;
  return kCuSuccess;
}
CuResult cuGetErrorName(CuResult result, const char** name) {
  *name = result == kCuIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return kCuSuccess;
}
CuResult cuGetErrorString(CuResult, const char** text) {
  *text = kernel_error.empty() ? "said by the fake" : kernel_error.c_str();
  return kCuSuccess;
}
CuResult cuDeviceGetCount(int* count) {
  *count = 1;
  return kCuSuccess;
}
CuResult cuDeviceGet(CuDevice* device, int ordinal) {
  *device = ordinal;
  return kCuSuccess;
}
CuResult cuDeviceGetName(char* name, int bytes, CuDevice) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  return kCuSuccess;
}
CuResult cuDeviceTotalMem_v2(size_t* bytes, CuDevice) {
  *bytes = size_t{2} << 30;
  return kCuSuccess;
}
CuResult cuDeviceGetAttribute(int* value, CuDeviceAttribute which, CuDevice) {
  const std::lock_guard lock(mutex);
  const CudaLimits limits = wanted_limits.value_or(default_limits());
  const std::pair<int, uint32_t> known[] = {
      {kCuMultiprocessors, limits.multiprocessors},
      {kCuCapabilityMajor, limits.arch / 10},
      {kCuCapabilityMinor, limits.arch % 10},
      {kCuL2Bytes, 1 << 20},
      {kCuMemoryClockKhz, 1000000},
      {kCuMemoryBusBits, 256},
      {kCuSharedBytesPerBlock, limits.shared_bytes_per_block},
      {kCuSharedBytesPerMultiprocessor, limits.shared_bytes_per_multiprocessor}};
  *value = 0;
  for (const auto& [attribute, of] : known) {
    if (attribute == which) *value = static_cast<int>(of);
  }
  return kCuSuccess;
}
CuResult cuDevicePrimaryCtxRetain(CuContext* context, CuDevice) {
  const std::lock_guard lock(mutex);
  ++users;
  *context = as<CuContext>(&users);
  return kCuSuccess;
}
CuResult cuDevicePrimaryCtxRelease_v2(CuDevice) {
  require_user();
  const std::lock_guard lock(mutex);
  if (--users == 0) sticky = kCuSuccess, kernel_error.clear();
  return kCuSuccess;
}
CuResult cuCtxPushCurrent_v2(CuContext) {
  require_user();
  return kCuSuccess;
}
CuResult cuCtxPopCurrent_v2(CuContext*) { return kCuSuccess; }
CuResult cuMemAlloc_v2(CuAddress* address, size_t bytes) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  const std::lock_guard lock(mutex);
  if (sticky != kCuSuccess) return sticky;
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) return kCuOutOfMemory;
  *address = reinterpret_cast<CuAddress>(memory);
  const CuResult kept = taking_memory([&] { blocks[*address] = bytes; });
  if (kept != kCuSuccess) std::free(memory);
  return kept;
}
CuResult cuMemFree_v2(CuAddress address) {
  const std::lock_guard lock(mutex);
  if (blocks.erase(address) != 1) std::abort();
  std::free(reinterpret_cast<void*>(address));
  return kCuSuccess;
}
CuResult cuMemAllocHost_v2(void** memory, size_t bytes) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  *memory = std::malloc(bytes);
  return kCuSuccess;
}
CuResult cuMemFreeHost(void* memory) {
  std::free(memory);
  return kCuSuccess;
}
CuResult cuMemcpyHtoDAsync_v2(CuAddress to, const void* from, size_t bytes, CuStream stream) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  const std::lock_guard lock(mutex);
  if (!is_inside(to, bytes)) std::abort();
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  const CuResult queued = taking_memory([&] { as<Stream*>(stream)->line->add_work(); });
  return queued == kCuSuccess ? sticky : queued;
}
CuResult cuMemcpyDtoHAsync_v2(void* to, CuAddress from, size_t bytes, CuStream stream) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  const std::lock_guard lock(mutex);
  if (!is_inside(from, bytes)) std::abort();
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  const CuResult queued = taking_memory([&] { as<Stream*>(stream)->line->add_work(); });
  return queued == kCuSuccess ? sticky : queued;
}
CuResult cuMemsetD8Async(CuAddress address, unsigned char value, size_t bytes, CuStream stream) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  if (Graph* const captured = as<Stream*>(stream)->captured; captured != nullptr)
    return taking_memory([&] { captured->add({}); });  // a node that does nothing
  const std::lock_guard lock(mutex);
  if (!is_inside(address, bytes)) std::abort();
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return sticky;
}
CuResult cuPointerGetAttribute(void* value, CuPointerAttribute which, CuAddress address) {
  const std::lock_guard lock(mutex);
  if (!is_inside(address, 1)) return kCuInvalidValue;
  *static_cast<int*>(value) = which == kCuMemoryType ? static_cast<int>(kCuDeviceMemory) : 0;
  return kCuSuccess;
}
CuResult cuStreamCreate(CuStream* stream, unsigned) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return make<Stream>(stream);
}
CuResult cuStreamDestroy_v2(CuStream stream) {
  delete as<Stream*>(stream);
  return kCuSuccess;
}
// Waiting for a stream that is captured spoils the capture.
CuResult cuStreamSynchronize(CuStream stream) {
  if (as<Stream*>(stream)->captured != nullptr) return kCuInvalidValue;
  FakeLine::see(as<Stream*>(stream)->line->now());
  return state();
}
CuResult cuStreamWaitEvent(CuStream stream, CuEvent event, unsigned) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  if (as<Stream*>(stream)->captured != nullptr) return kCuInvalidValue;
  return taking_memory([&] { as<Stream*>(stream)->line->add_wait(as<Event*>(event)->moment); });
}
CuResult cuStreamIsCapturing(CuStream stream, CuCaptureStatus* status) {
  *status = as<Stream*>(stream)->captured != nullptr ? 1 : kCuNotCapturing;
  return kCuSuccess;
}
CuResult cuStreamGetCaptureInfo_v3(CuStream stream, CuCaptureStatus* status, uint64_t* id,
                                   CuGraph* graph, const CuGraphNode** after,
                                   const CuGraphEdge** edges, size_t* count) {
  static thread_local CuGraphNode last;
  Graph* const captured = as<Stream*>(stream)->captured;
  if (captured == nullptr) return kCuInvalidValue;
  last = reinterpret_cast<CuGraphNode>(captured->nodes.size());
  asked_graph = captured;
  *status = kCuCapturing, *id = as<Stream*>(stream)->capture, *graph = as<CuGraph>(captured);
  *after = &last, *edges = nullptr, *count = captured->nodes.empty() ? 0 : 1;
  return kCuSuccess;
}
CuResult cuGraphNodeGetType(CuGraphNode node, CuGraphNodeType* type) {
  *type = kCuKernelNodeType + (asked_graph->nodes.at(place_of(node)).function == nullptr ? 1 : 0);
  return kCuSuccess;
}
CuResult cuStreamBeginCapture_v2(CuStream stream, int) {
  static std::atomic<uint64_t> captures{0};
  return taking_memory([&] {
    as<Stream*>(stream)->captured = new Graph;
    as<Stream*>(stream)->capture = ++captures;
  });
}
CuResult cuStreamEndCapture(CuStream stream, CuGraph* graph) {
  *graph = as<CuGraph>(std::exchange(as<Stream*>(stream)->captured, nullptr));
  return kCuSuccess;
}
CuResult cuEventCreate(CuEvent* event, unsigned) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return make<Event>(event);
}
CuResult cuEventDestroy_v2(CuEvent event) {
  delete as<Event*>(event);
  return kCuSuccess;
}
CuResult cuEventRecord(CuEvent event, CuStream stream) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  if (as<Stream*>(stream)->captured != nullptr) return kCuInvalidValue;
  as<Event*>(event)->moment = as<Stream*>(stream)->line->now();
  return kCuSuccess;
}
CuResult cuEventQuery(CuEvent event) {
  FakeLine::see(as<Event*>(event)->moment);
  return state();
}
CuResult cuEventSynchronize(CuEvent event) {
  if (const CuResult failed = wait_fault.exchange(kCuSuccess); failed != kCuSuccess) return failed;
  return cuEventQuery(event);
}
CuResult cuEventElapsedTime(float* milliseconds, CuEvent from, CuEvent to) {
  *milliseconds = from == to ? 0.0f : 1.0f;
  return kCuSuccess;
}
CuResult cuModuleLoadData(CuModule* module, const void*) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  const CuResult made = make<Module>(module);
  const std::lock_guard lock(mutex);
  if (made == kCuSuccess) ++modules;
  return made;
}
CuResult cuModuleUnload(CuModule module) {
  require_user();
  const std::unique_ptr<Module> owner(as<Module*>(module));
  const std::lock_guard lock(mutex);
  --modules;
  const auto is_used = [](const auto& function) { return !FakeLine::is_seen(function->used); };
  early_unloads += std::ranges::any_of(owner->functions, is_used) ? 1 : 0;
  return kCuSuccess;
}
CuResult cuModuleGetFunction(CuFunction* function, CuModule module, const char* name) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return taking_memory([&] {
    auto& functions = as<Module*>(module)->functions;
    functions.push_back(
        std::make_unique<Function>(Function{name, gyre::cuda_host::find_host_kernel(name)}));
    *function = as<CuFunction>(functions.back().get());
  });
}
CuResult cuFuncGetAttribute(int* value, CuFunctionAttribute which, CuFunction function) {
  *value = which == kCuMaxThreadsPerBlock ? as<Function*>(function)->max_threads() : 0;
  return kCuSuccess;
}
CuResult cuFuncSetAttribute(CuFunction, CuFunctionAttribute, int) { return kCuSuccess; }
CuResult cuLaunchKernelEx(const CuLaunchConfig* config, CuFunction function, void** params,
                          void**) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  const unsigned threads = config->block[0];
  if (threads > static_cast<unsigned>(as<Function*>(function)->max_threads()))
    return kCuInvalidValue;
  const bool overlaps = config->attribute_count == 1 &&
                        config->attributes[0].id == CuLaunchAttribute::kProgrammaticSerialization &&
                        config->attributes[0].value[0] == 1;
  auto* const stream = as<Stream*>(config->stream);
  Graph* const captured = stream->captured;
  if (captured == nullptr) {
    const std::lock_guard lock(mutex);
    ::overlaps = ::overlaps << 1 | (overlaps ? 1u : 0u);
  }
  return taking_memory([&] {
    const unsigned* const grid = config->grid;
    Node node =
        make_node(function, {{grid[0], grid[1], grid[2]}, threads, config->shared_bytes}, params);
    if (captured == nullptr) {
      stream->line->add_work();
      return run(node, nullptr, stream->line->now());
    }
    node.programmatic = overlaps;
    captured->add(std::move(node));
    return kCuSuccess;
  });
}
CuResult cuGraphCreate(CuGraph* graph, unsigned) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return make<Graph>(graph);
}
CuResult cuGraphDestroy(CuGraph graph) {
  delete as<Graph*>(graph);
  return kCuSuccess;
}
CuResult cuGraphAddKernelNode_v2(CuGraphNode* node, CuGraph graph, const CuGraphNode* after,
                                 size_t count, const CuKernelNode* values) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return taking_memory([&] {
    std::vector<Node>& nodes = as<Graph*>(graph)->nodes;
    const unsigned* const grid = values->grid;
    Node made = make_node(values->function,
                          {{grid[0], grid[1], grid[2]}, values->block[0], values->shared_bytes},
                          values->params);
    for (size_t i = 0; i < count; ++i) made.after.push_back(place_of(after[i]));
    nodes.push_back(std::move(made));
    *node = reinterpret_cast<CuGraphNode>(nodes.size());
  });
}
CuResult cuGraphAddDependencies_v2(CuGraph graph, const CuGraphNode* from, const CuGraphNode* to,
                                   const CuGraphEdge* edges, size_t count) {
  return taking_memory([&] {
    std::vector<Node>& nodes = as<Graph*>(graph)->nodes;
    for (size_t i = 0; i < count; ++i) {
      if (place_of(from[i]) >= nodes.size() || place_of(to[i]) >= nodes.size())
        return kCuInvalidValue;
      nodes[place_of(to[i])].after.push_back(place_of(from[i]));
      nodes[place_of(to[i])].programmatic =
          edges != nullptr && edges[i].type == kCuProgrammatic.type;
    }
    return kCuSuccess;
  });
}
CuResult cuGraphInstantiateWithFlags(CuGraphExec* exec, CuGraph graph, unsigned long long) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return taking_memory([&] {
    *exec = as<CuGraphExec>(new Graph(*as<Graph*>(graph)));
    const std::lock_guard lock(mutex);
    early_args.clear();
    for (const Node& node : as<Graph*>(graph)->nodes) {
      constexpr uint32_t kProgrammaticBit = 1u << 31;  // gyre_fake_cuda_early_args()
      early_args.push_back((node.args.early & ~kProgrammaticBit) |
                           (node.programmatic ? kProgrammaticBit : 0));
    }
  });
}
CuResult cuGraphExecDestroy(CuGraphExec exec) {
  delete as<Graph*>(exec);
  return kCuSuccess;
}
CuResult cuGraphLaunch(CuGraphExec exec, CuStream stream) {
  if (const CuResult failed = fault(); failed != kCuSuccess) return failed;
  return taking_memory([&] {
    FakeLine& line = *as<Stream*>(stream)->line;
    line.add_work();
    return run_graph(*as<Graph*>(exec), [&](const Node& node, const Node* ahead) {
      return run(node, ahead, line.now());
    });
  });
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming, readability-function-size)
