#include "metal_host/standin_driver.h"

#include <sys/mman.h>

#include <cstring>

#include "metal_host/standin_objects.h"

namespace gyre::metal_host {

using metal::Buffer;
using metal::Library;
using metal::PipelineState;

// Never destroyed: devices may be closed by destructors of static objects.
State& state() {
  static State& all = *new State;
  return all;
}

void State::note(const std::string& violation) {
  const std::lock_guard lock(mutex);
  violations.push_back(violation);
}

bool is_last(uint64_t& calls_left) {
  if (calls_left == ~uint64_t{0}) return false;
  return calls_left-- == 0;
}

namespace {

constexpr uint64_t kMaxBufferBytes = uint64_t{8} << 30;
constexpr auto kTail = std::byte{0xA5};  // between a buffer's end and its last page's

std::string reason() {
  const std::lock_guard lock(state().mutex);
  return state().reason;
}

metal::Description describe() {
  return {.name = "stand-in",
          .memory_bytes = kMaxBufferBytes,
          .buffer_bytes = kMaxBufferBytes,
          .page_bytes = kPageBytes,
          .threadgroup_bytes = kMaxThreadgroupBytes};
}

bool take_buffer(uint64_t bytes) {
  const std::lock_guard lock(state().mutex);
  if (is_last(state().buffers_left) || bytes > state().memory_left) return false;
  state().memory_left -= bytes;
  ++state().counts.buffers;
  return true;
}

// Behind the last page lies one that nobody may touch.
Buffer* buffer_make(uint64_t bytes) {
  if (bytes == 0) state().note("a buffer of 0 bytes");
  if (bytes == 0 || bytes > kMaxBufferBytes || !take_buffer(bytes)) return nullptr;
  const uint64_t pages = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const uint64_t mapped = pages + 2 * kPageBytes;
  void* const memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(memory);
  mprotect(first + pages, 2 * kPageBytes, PROT_NONE);
  auto* const made = new Buffer{.contents = first, .bytes = bytes, .mapped = mapped};
  std::memset(first + bytes, static_cast<int>(kTail), pages - bytes);
  return made;
}

Buffer* buffer_wrap(void* pages, uint64_t bytes) {
  if (reinterpret_cast<uintptr_t>(pages) % kPageBytes != 0 || bytes % kPageBytes != 0 || bytes == 0)
    state().note("wrapped memory must be whole pages");
  if (!take_buffer(0)) return nullptr;
  return new Buffer{.contents = static_cast<std::byte*>(pages), .bytes = bytes};
}

void* buffer_contents(Buffer* buffer) { return buffer->contents; }

void buffer_free(Buffer* buffer) {
  if (buffer->users != 0) return state().note("a buffer was freed while work uses it");
  if (buffer->mapped != 0) {
    for (uint64_t i = buffer->bytes; i % kPageBytes != 0; ++i) {
      if (buffer->contents[i] == kTail) continue;
      state().note("a kernel wrote behind the end of a buffer");
      break;
    }
    munmap(buffer->contents, buffer->mapped);
  }
  const uint64_t bytes = buffer->mapped != 0 ? buffer->bytes : 0;
  delete buffer;
  const std::lock_guard lock(state().mutex);
  state().memory_left += bytes;
  --state().counts.buffers;
}

metal::LibraryResult library_make(const std::string& text) {
  const std::lock_guard lock(state().mutex);
  ++state().counts.compiled;
  if (!state().compile_log.empty()) return {nullptr, state().compile_log};
  if (text.find("#include \"") != text.npos) return {nullptr, "error: an #include is left"};
  ++state().counts.libraries;
  return {new Library{text}, ""};
}

void library_free(Library* library) {
  delete library;
  const std::lock_guard lock(state().mutex);
  --state().counts.libraries;
}

metal::PipelineResult pipeline_make(Library* library, const char* entry,
                                    const std::array<uint32_t, 2>& constants) {
  const std::string name = entry;
  if (library->text.find("kernel void " + name + "(") == std::string::npos)
    return {nullptr, 0, "the library has no function " + name};
  const HostKernel* const kernel = find_kernel(entry);
  if (kernel == nullptr) return {nullptr, 0, "no host kernel is registered as " + name};
  const std::lock_guard lock(state().mutex);
  ++state().counts.pipelines;
  const uint32_t max_threads = state().max_threads;
  return {new PipelineState{kernel, constants, max_threads}, max_threads, ""};
}

void pipeline_free(PipelineState* pipeline) {
  delete pipeline;
  const std::lock_guard lock(state().mutex);
  --state().counts.pipelines;
}

}  // namespace

const metal::Driver& standin_driver() {
  static constexpr metal::Driver kDriver = {.reason = reason,
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
  return kDriver;
}

StandinCounts standin_counts() {
  const std::lock_guard lock(state().mutex);
  return state().counts;
}

std::vector<std::string> standin_violations() {
  const std::lock_guard lock(state().mutex);
  return state().violations;
}

void clear_standin_violations() {
  const std::lock_guard lock(state().mutex);
  state().violations.clear();
}

void fail_buffer_after(uint64_t calls) {
  const std::lock_guard lock(state().mutex);
  state().buffers_left = calls;
}

void set_standin_memory(uint64_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().memory_left = bytes;
}

void fail_begin_after(uint64_t calls) {
  const std::lock_guard lock(state().mutex);
  state().begins_left = calls;
}

void fail_commit_after(uint64_t calls, const std::string& error) {
  const std::lock_guard lock(state().mutex);
  state().commits_left = calls;
  state().commit_error = error;
}

void fail_compile(const std::string& log) {
  const std::lock_guard lock(state().mutex);
  state().compile_log = log;
}

void set_standin_reason(const std::string& reason) {
  const std::lock_guard lock(state().mutex);
  state().reason = reason;
}

void set_standin_max_threads(uint32_t threads) {
  const std::lock_guard lock(state().mutex);
  state().max_threads = threads;
}

HoldQueues::HoldQueues() {
  const std::lock_guard lock(state().mutex);
  ++state().holds;
}

HoldQueues::~HoldQueues() {
  {
    const std::lock_guard lock(state().mutex);
    --state().holds;
  }
  state().changed.notify_all();
}

}  // namespace gyre::metal_host
