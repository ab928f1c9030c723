// Apple's driver, by metal-cpp (Apple's headers, which call the Objective-C runtime from C++). The
// only file that knows it; compiled on Apple systems, and cross-compiled by scripts/metal_cross.sh.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <unistd.h>

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#include <algorithm>
#include <cmath>
#include <memory>

#include "metal/driver.h"

namespace gyre::metal {

struct Queue {
  NS::SharedPtr<MTL::CommandQueue> queue;
  // Buffers are not tracked, so command buffers of a queue may overlap: each waits for the fence
  // that the one before has updated.
  NS::SharedPtr<MTL::Fence> fence;
};

struct Commands {
  Commands() = default;
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;
  // Metal ends the process where an encoder goes that was not ended.
  ~Commands() {
    if (encoder) encoder->endEncoding();
  }

  NS::SharedPtr<MTL::CommandBuffer> buffer;
  NS::SharedPtr<MTL::ComputeCommandEncoder> encoder;
  MTL::Fence* fence = nullptr;
};

namespace {

// Metal hands out objects that the thread's pool releases.
class Pool {
 public:
  Pool() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { pool_->release(); }

 private:
  NS::AutoreleasePool* pool_;
};

// Never released: it is the process's.
MTL::Device* gpu() {
  static MTL::Device* const device = MTL::CreateSystemDefaultDevice();
  return device;
}

MTL::Buffer* of(Buffer* buffer) { return reinterpret_cast<MTL::Buffer*>(buffer); }
MTL::Library* of(Library* library) { return reinterpret_cast<MTL::Library*>(library); }
MTL::ComputePipelineState* of(PipelineState* state) {
  return reinterpret_cast<MTL::ComputePipelineState*>(state);
}

std::string text_of(const NS::String* string) {
  return string != nullptr ? string->utf8String() : "";
}

std::string text_of(const NS::Error* error) {
  if (error == nullptr) return "Metal gave no reason";
  return text_of(error->localizedDescription()) + " (code " + std::to_string(error->code()) + ")";
}

NS::String* string_of(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

std::string reason() {
  const Pool pool;
  constexpr NS::OperatingSystemVersion kOldest = {14, 0, 0};  // MSL 3.1
  if (!NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion(kOldest))
    return "macOS is older than 14, whose Metal Gyre's kernels need";
  MTL::Device* const device = gpu();
  if (device == nullptr) return "Metal finds no GPU";
  // Simdgroups of 32 lanes, their matrices, memory that the host shares.
  if (!device->supportsFamily(MTL::GPUFamilyApple7) || !device->hasUnifiedMemory())
    return text_of(device->name()) + " is no Apple GPU of the M1's family or later";
  return "";
}

Description describe() {
  const Pool pool;
  MTL::Device* const device = gpu();
  return {.name = text_of(device->name()),
          .memory_bytes = device->recommendedMaxWorkingSetSize(),
          .buffer_bytes = device->maxBufferLength(),
          .page_bytes = static_cast<uint64_t>(getpagesize()),
          .threadgroup_bytes = static_cast<uint32_t>(device->maxThreadgroupMemoryLength())};
}

constexpr MTL::ResourceOptions kShared =
    MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked;

// Metal clears new buffers.
Buffer* buffer_make(uint64_t bytes) {
  const Pool pool;
  return reinterpret_cast<Buffer*>(gpu()->newBuffer(bytes, kShared));
}

Buffer* buffer_wrap(void* pages, uint64_t bytes) {
  const Pool pool;
  return reinterpret_cast<Buffer*>(gpu()->newBuffer(pages, bytes, kShared, nullptr));  // no copy
}

void* buffer_contents(Buffer* buffer) {
  const Pool pool;
  return of(buffer)->contents();
}

void buffer_free(Buffer* buffer) {
  const Pool pool;
  of(buffer)->release();
}

LibraryResult library_make(const std::string& text) {
  const Pool pool;
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setFastMathEnabled(false);
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  NS::Error* error = nullptr;
  MTL::Library* const library = gpu()->newLibrary(string_of(text), options.get(), &error);
  if (library == nullptr) return {nullptr, text_of(error)};
  return {reinterpret_cast<Library*>(library), ""};
}

void library_free(Library* library) {
  const Pool pool;
  of(library)->release();
}

PipelineResult pipeline_make(Library* library, const char* entry,
                             const std::array<uint32_t, 2>& constants) {
  constexpr NS::UInteger kLanes = 32;  // that the kernels count on
  const Pool pool;
  const auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  for (NS::UInteger i = 0; i < constants.size(); ++i)
    values->setConstantValue(&constants[i], MTL::DataTypeUInt, i);
  NS::Error* error = nullptr;
  const auto function =
      NS::TransferPtr(of(library)->newFunction(string_of(entry), values.get(), &error));
  if (!function) return {nullptr, 0, text_of(error)};
  MTL::ComputePipelineState* const state = gpu()->newComputePipelineState(function.get(), &error);
  if (state == nullptr) return {nullptr, 0, text_of(error)};
  if (state->threadExecutionWidth() != kLanes) {
    const NS::UInteger lanes = state->threadExecutionWidth();
    state->release();
    return {nullptr, 0, "simdgroups have " + std::to_string(lanes) + " lanes instead of 32"};
  }
  return {reinterpret_cast<PipelineState*>(state),
          static_cast<uint32_t>(state->maxTotalThreadsPerThreadgroup()), ""};
}

void pipeline_free(PipelineState* state) {
  const Pool pool;
  of(state)->release();
}

Queue* queue_make() {
  const Pool pool;
  Queue made{NS::TransferPtr(gpu()->newCommandQueue()), NS::TransferPtr(gpu()->newFence())};
  return made.queue && made.fence ? new Queue(std::move(made)) : nullptr;
}

void queue_free(Queue* queue) {
  const Pool pool;
  delete queue;
}

// Blocks while 64 command buffers of the queue are not done.
Commands* begin(Queue* queue) {
  const Pool pool;
  auto made = std::make_unique<Commands>();
  made->buffer = NS::RetainPtr(queue->queue->commandBuffer());
  if (!made->buffer) return nullptr;
  made->encoder = NS::RetainPtr(made->buffer->computeCommandEncoder(MTL::DispatchTypeConcurrent));
  if (!made->encoder) return nullptr;
  made->fence = queue->fence.get();
  made->encoder->waitForFence(made->fence);
  return made.release();
}

void dispatch(Commands* commands, const Dispatch& dispatch) {
  const Pool pool;
  MTL::ComputeCommandEncoder& encoder = *commands->encoder.get();
  encoder.setComputePipelineState(of(dispatch.state));
  encoder.setBytes(dispatch.params, dispatch.params_bytes, kParamsIndex);
  for (uint32_t i = 0; i < dispatch.binding_count; ++i) {
    const Binding& binding = dispatch.bindings[i];
    encoder.setBuffer(of(binding.buffer), binding.offset, kFirstBindingIndex + i);
  }
  encoder.setBytes(&dispatch.arguments, sizeof(dispatch.arguments), kArgumentsIndex);
  // A kernel that has a threadgroup argument must get some.
  encoder.setThreadgroupMemoryLength(std::max(dispatch.threadgroup_bytes, kThreadgroupUnit), 0);
  encoder.dispatchThreadgroups(MTL::Size(dispatch.grid[0], dispatch.grid[1], dispatch.grid[2]),
                               MTL::Size(dispatch.threads, 1, 1));
}

void barrier(Commands* commands) {
  const Pool pool;
  commands->encoder->memoryBarrier(MTL::BarrierScopeBuffers);
}

void commit(Commands* commands) {
  const Pool pool;
  commands->encoder->updateFence(commands->fence);
  commands->encoder->endEncoding();
  commands->encoder.reset();
  commands->buffer->commit();
}

bool done(Commands* commands) {
  const Pool pool;
  return commands->buffer->status() >= MTL::CommandBufferStatusCompleted;  // or Error, behind it
}

void wait(Commands* commands) {
  const Pool pool;
  commands->buffer->waitUntilCompleted();
}

std::string error(Commands* commands) {
  const Pool pool;
  if (commands->buffer->status() != MTL::CommandBufferStatusError) return "";
  return text_of(commands->buffer->error());
}

uint64_t gpu_ns(Commands* commands) {
  const Pool pool;
  const double seconds = commands->buffer->GPUEndTime() - commands->buffer->GPUStartTime();
  return static_cast<uint64_t>(std::llround(std::max(seconds, 0.0) * 1e9));
}

void commands_free(Commands* commands) {
  const Pool pool;
  delete commands;
}

}  // namespace

const Driver* apple_driver() {
  static constexpr Driver kDriver = {.reason = reason,
                                     .describe = describe,
                                     .buffer_make = buffer_make,
                                     .buffer_wrap = buffer_wrap,
                                     .buffer_contents = buffer_contents,
                                     .buffer_free = buffer_free,
                                     .library_make = library_make,
                                     .library_free = library_free,
                                     .pipeline_make = pipeline_make,
                                     .pipeline_free = pipeline_free,
                                     .queue_make = queue_make,
                                     .queue_free = queue_free,
                                     .begin = begin,
                                     .dispatch = dispatch,
                                     .barrier = barrier,
                                     .commit = commit,
                                     .done = done,
                                     .wait = wait,
                                     .error = error,
                                     .gpu_ns = gpu_ns,
                                     .commands_free = commands_free};
  return &kDriver;
}

}  // namespace gyre::metal
