#pragma once
// The Metal calls that the backend makes, as a table. driver_apple.cpp has Apple's; tests install
// one over host memory that runs the kernels' text (tests/metal_host/standin_driver.h).

#include <array>
#include <cstdint>
#include <string>

namespace gyre::metal {

// The driver's own objects.
struct Buffer;
struct Library;
struct PipelineState;
struct Queue;
struct Commands;

constexpr uint32_t kMaxBindings = 16;       // arguments of a kernel
constexpr uint32_t kParamsIndex = 0;        // [[buffer(0)]]: Params, as bytes
constexpr uint32_t kFirstBindingIndex = 1;  // [[buffer(1 + i)]]: argument i
// [[buffer(17)]]: bit i: argument i is there; bit 16 + i: it begins at a multiple of 16.
constexpr uint32_t kArgumentsIndex = 17;
constexpr uint32_t kMaxParamsBytes = 4096;  // that setBytes takes
constexpr uint32_t kThreadgroupUnit = 16;   // threadgroup memory comes in multiples of it

struct Description {
  std::string name;                // "Apple M2 Pro"
  uint64_t memory_bytes = 0;       // that the GPU works with at full speed
  uint64_t buffer_bytes = 0;       // the longest buffer
  uint64_t page_bytes = 0;         // what buffer_wrap counts in
  uint32_t threadgroup_bytes = 0;  // the most threadgroup memory
};

struct LibraryResult {
  Library* library = nullptr;
  std::string error;  // the compiler's log; empty: it compiled
};

struct PipelineResult {
  PipelineState* state = nullptr;
  uint32_t max_threads = 0;  // of a threadgroup; fewer than the device's where registers are short
  std::string error;
};

struct Binding {
  Buffer* buffer = nullptr;
  uint64_t offset = 0;
};

struct Dispatch {
  PipelineState* state = nullptr;
  const void* params = nullptr;  // copied
  uint32_t params_bytes = 0;
  std::array<Binding, kMaxBindings> bindings{};
  uint32_t binding_count = 0;
  uint32_t arguments = 0;          // [[buffer(17)]]
  uint32_t grid[3] = {1, 1, 1};    // threadgroups
  uint32_t threads = 0;            // of each
  uint32_t threadgroup_bytes = 0;  // [[threadgroup(0)]]
};

// Thread-safe, except that one thread at a time encodes into a Commands.
struct Driver {
  std::string (*reason)() = nullptr;  // why there is no GPU to use; empty: there is one
  Description (*describe)() = nullptr;

  // Memory that host and GPU share.
  Buffer* (*buffer_make)(uint64_t bytes) = nullptr;               // zero-filled; null: no memory
  Buffer* (*buffer_wrap)(void* pages, uint64_t bytes) = nullptr;  // whole pages; null: refused
  void* (*buffer_contents)(Buffer* buffer) = nullptr;
  void (*buffer_free)(Buffer* buffer) = nullptr;  // no command that is not done may use it

  LibraryResult (*library_make)(const std::string& text) = nullptr;
  void (*library_free)(Library* library) = nullptr;
  // The entry function with function constants 0 and 1.
  PipelineResult (*pipeline_make)(Library* library, const char* entry,
                                  const std::array<uint32_t, 2>& constants) = nullptr;
  void (*pipeline_free)(PipelineState* state) = nullptr;

  Queue* (*queue_make)() = nullptr;  // null: no memory
  void (*queue_free)(Queue* queue) = nullptr;

  // Commands are one command buffer. Those of a queue run one after the other, in the order of
  // commit(); what one holds may run at the same time, up to the next barrier.
  Commands* (*begin)(Queue* queue) = nullptr;  // null: no memory
  void (*dispatch)(Commands* commands, const Dispatch& dispatch) = nullptr;
  void (*barrier)(Commands* commands) = nullptr;
  void (*commit)(Commands* commands) = nullptr;
  bool (*done)(Commands* commands) = nullptr;
  void (*wait)(Commands* commands) = nullptr;
  // When done: what went wrong, empty if nothing; and how long the GPU took.
  std::string (*error)(Commands* commands) = nullptr;
  uint64_t (*gpu_ns)(Commands* commands) = nullptr;
  void (*commands_free)(Commands* commands) = nullptr;
};

// Null: this build has none for this system.
const Driver* driver();
// Why there is no Metal device; empty: there is one.
std::string absent_reason();
// In place of the system's, null takes it back. Before a device is opened.
void set_driver_for_test(const Driver* driver);

#if defined(GYRE_HAVE_METAL)
const Driver* apple_driver();
#endif

}  // namespace gyre::metal
