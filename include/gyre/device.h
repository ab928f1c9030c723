#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gyre/export.h"
#include "gyre/tensor.h"
#include "gyre/trace.h"

namespace gyre {

class DeviceImpl;

struct DeviceOptions {
  uint32_t threads = 0;   // CPU: 0 takes GYRE_THREADS, else every usable core
  uint32_t spin_us = 50;  // CPU: how long an idle worker polls before it sleeps
  // Freed memory kept for reuse, the rest goes back. None: 256 MiB on the CPU, all of it on a GPU,
  // where giving memory back waits for the work.
  std::optional<uint64_t> pool_limit_bytes{};
  // CUDA: the folder of compiled kernels. Empty: $GYRE_KERNEL_CACHE, else gyre in $XDG_CACHE_HOME
  // or ~/.cache; "off": none. Folders of $GYRE_KERNEL_PATH are read, too (docs/cold_start.md).
  std::string kernel_cache{};
  // CUDA, Metal: wait after each command, so that an error names the one that failed. Slow.
  bool check_each_launch = false;
  // CPU: called about every 20 ms while a list runs, by the thread that submits or replays it. What
  // it throws ends the list within some milliseconds, custom kernels' tasks when they return, and
  // leaves the call. What has run has run; the list stays recorded, and may be submitted again if
  // it works on nothing in place, or dropped. A KvCache whose load() ends so is refused until it is
  // cleared or loaded again. It may not submit, instantiate or replay on a CPU device itself.
  std::function<void()> poll{};
};

struct DeviceInfo {
  std::string name{};         // what Device::open takes: "cpu", "cuda:0", "metal"
  bool available = false;     // false: `reason` says why
  std::string reason{};       // empty when available
  std::string description{};  // the processor, and what the kernels use of it
  uint32_t compute_units = 0;
  uint64_t memory_bytes = 0;
};

struct MemoryUse {
  uint64_t in_use_bytes = 0;  // blocks that tensors hold
  uint64_t cached_bytes = 0;  // blocks kept for reuse
  uint64_t system_allocations = 0;
  uint64_t reuses = 0;
};

struct KernelDescription {
  std::string name{};
  std::string args{};  // "k read, k_cache write, ..."
  uint32_t params_bytes = 0;
  uint32_t variants = 0;  // how many specs this device runs
  uint32_t loaded = 0;    // how many of them have been built so far
};

// When the owner of wrapped memory is let go.
enum class OwnerRelease : uint8_t {
  when_done,  // when all commands that use the memory are done
  // CUDA: as soon as Encoder::submit_on() returns. The owner must free the memory in the order of
  // that stream, as PyTorch's allocator does for tensors of the current stream. Work on Gyre's own
  // stream holds the owner until it is done all the same.
  in_stream_order,
};

// A handle; copies share the device. May be used from several threads at once.
class GYRE_API Device {
 public:
  static Device open(std::string_view name, const DeviceOptions& options = {});

  const DeviceInfo& info() const;
  MemoryUse memory() const;
  void trim() const;  // gives cached memory back to the system
  void wait() const;  // until all submitted work is done; throws what went wrong while it ran
  // CUDA: the stream that everything runs on, for others who must order their work before it; 0:
  // the device has none. Let others only wait for it or make it wait.
  uint64_t stream() const;

  Tensor tensor(DType dtype, const Dims& shape) const;  // contiguous, zero-filled

  // Memory the caller owns, without a copy. Empty strides mean contiguous. The memory must outlive
  // every tensor and submitted command that uses it, or be held by `owner`.
  Tensor wrap(void* data, DType dtype, const Dims& shape, const Dims& strides = {},
              std::shared_ptr<void> owner = {},
              OwnerRelease release = OwnerRelease::when_done) const;
  Tensor wrap(const void* data, DType dtype, const Dims& shape, const Dims& strides = {},
              std::shared_ptr<void> owner = {},
              OwnerRelease release = OwnerRelease::when_done) const;  // read-only

  std::vector<KernelDescription> kernels() const;

  // Between the two calls every command of this device is timed (see trace.h).
  void start_trace() const;
  Trace stop_trace() const;

  bool operator==(const Device& other) const { return impl_ == other.impl_; }  // one and the same

 private:
  friend struct Internals;
  explicit Device(std::shared_ptr<DeviceImpl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<DeviceImpl> impl_;
};

// Every backend Gyre knows: its devices with their properties, or why it has none here.
GYRE_API std::vector<DeviceInfo> devices();

}  // namespace gyre
