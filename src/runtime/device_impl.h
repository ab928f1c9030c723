#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gyre/device.h"
#include "runtime/command_list.h"
#include "runtime/command_notes.h"
#include "runtime/constant_cache.h"
#include "runtime/internals.h"
#include "runtime/process.h"
#include "runtime/trace_log.h"

namespace gyre {

class FenceState {
 public:
  virtual ~FenceState() = default;
  virtual void wait() = 0;  // throws what went wrong, every time it is asked
  virtual bool done() const = 0;
};

class GraphImpl {
 public:
  GraphImpl() = default;
  GraphImpl(const GraphImpl&) = delete;
  GraphImpl& operator=(const GraphImpl&) = delete;
  virtual ~GraphImpl() = default;
  virtual std::shared_ptr<FenceState> replay() = 0;
  virtual uint32_t size() const = 0;

  CommandNotes notes;  // of the list; the runtime's
};

// What a pipeline is found by.
struct KernelKey {
  const KernelInfo* kernel = nullptr;
  uint64_t spec = 0;

  bool operator==(const KernelKey&) const = default;
};

struct BuiltKernel {
  std::string name;
  bool compiled = false;  // false: it came from a cache
  double seconds = 0;
  uint64_t done = 0, all = 0;  // of this build
};
using BuildCallback = std::function<void(const BuiltKernel&)>;

// The only virtual interface of a backend. It never learns the name of an op. Thread-safe.
class DeviceImpl : public std::enable_shared_from_this<DeviceImpl> {
 public:
  // `uses`: what traces and listings say about kernels; outlives the device.
  explicit DeviceImpl(std::span<const KernelUse> uses = {});
  DeviceImpl(const DeviceImpl&) = delete;
  DeviceImpl& operator=(const DeviceImpl&) = delete;
  virtual ~DeviceImpl() = default;

  virtual const DeviceInfo& info() const = 0;
  virtual std::shared_ptr<Storage> allocate(uint64_t bytes) = 0;  // zero-filled
  virtual std::shared_ptr<Storage> wrap(const Storage::Block& block,
                                        std::shared_ptr<void> owner) = 0;
  // Null: not here. It may still be building, see Pipeline. One of the device's table stays until
  // the device goes; one of a custom kernel is the caller's to hold while it is in use.
  virtual std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) = 0;
  virtual std::string describe(const KernelInfo& kernel, uint64_t spec) const = 0;  // how it works
  // Whether pipeline() can have one. Builds nothing.
  virtual bool has(const KernelInfo& kernel, uint64_t spec) const = 0;
  // Every Spec that this device's plans can ask for, of a kernel whose use lists none.
  virtual std::span<const uint64_t> planned_specs(const KernelInfo& /*kernel*/) const { return {}; }
  // What to do about a problem, where there is a choice: kernel, spec, splits
  // (abi/attention_plan.h). `plan` holds the op's default; false leaves it, for a device that has
  // nothing to choose. Pure: by the problem and the device's limits alone; builds and allocates
  // nothing.
  virtual bool plan(const KernelInfo& /*kernel*/, const void* /*problem*/, void* /*plan*/) const {
    return false;
  }
  // Builds pipelines ahead, several at a time, and returns when all are there. `built` is told of
  // each kernel that took building, in the caller's thread. Throws, at the end, why one cannot be.
  // Nothing where pipeline() has nothing to build.
  virtual void build(std::span<const KernelKey> /*keys*/, const BuildCallback& /*built*/) {}
  // Devices whose plans decide what build() is for: this one, unless it stands for several.
  virtual std::vector<std::shared_ptr<const DeviceImpl>> stands_for() const {
    return {shared_from_this()};
  }
  virtual uint32_t loaded_pipelines(const KernelInfo& kernel) const = 0;
  // A null fence means the work is complete.
  virtual std::shared_ptr<FenceState> submit(const CommandList& list) = 0;
  // Onto a stream of the caller's; refused where there are none.
  virtual std::shared_ptr<FenceState> submit_on(uint64_t stream, const CommandList& list);
  virtual std::unique_ptr<GraphImpl> instantiate(CommandList list) = 0;
  virtual MemoryUse memory() const = 0;
  virtual void trim() = 0;
  virtual void wait() {}  // until all submitted work is done; nothing where submit() runs it
  virtual uint64_t stream() const { return 0; }  // a handle of the backend's; 0: there is none

  // Refuses a child of fork(): the device's threads, and what they do, are the parent's.
  void require_same_process(const char* op) const;
  uint64_t id() const { return id_; }  // never reused in a process, unlike an address
  std::span<const KernelUse> kernel_uses() const { return uses_; }
  std::span<const uint64_t> specs(const KernelUse& use) const {
    return use.specs != nullptr ? use.specs() : planned_specs(*use.kernel);
  }
  TraceLog& trace() { return trace_; }
  ConstantCache& constants() { return constants_; }

 private:
  uint64_t id_ = 0;
  const uint64_t process_ = process_generation();
  std::span<const KernelUse> uses_;
  TraceLog trace_;
  ConstantCache constants_;
};

}  // namespace gyre
