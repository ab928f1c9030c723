#pragma once
// What devices have in common whose work goes on after submit() and whose pipelines take long to
// build: GPUs.

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "gyre/error.h"
#include "runtime/buffer_pool.h"
#include "runtime/build_queue.h"
#include "runtime/device_impl.h"
#include "runtime/lazy_pipeline.h"
#include "runtime/pipeline_cache.h"

namespace gyre {

// A list that was submitted, until it is known to be done. Knows its commands by name, in case it
// fails, and holds what must outlive it.
class QueuedWork : public FenceState {
 public:
  struct Work {
    const CommandList* list = nullptr;  // of a graph that `holder` holds; else `eager`
    CommandList eager;                  // without args
    std::shared_ptr<const void> holder;
  };

  explicit QueuedWork(Work work) : work_(std::move(work)) {}

  const CommandList& list() const { return work_.list != nullptr ? *work_.list : work_.eager; }
  bool is_finished() const { return finished_.load(std::memory_order_acquire); }
  void set_finished() { finished_.store(true, std::memory_order_release); }
  // Lets go of what it held, which may run code of the owners: call it without a lock.
  void let_go() { work_ = {}; }
  void fail_with(const Error& error) noexcept {  // unless it has finished
    if (is_finished()) return;
    error_ = error;
    set_finished();
  }

 protected:
  void throw_error() const {
    if (is_finished() && error_) throw Error(*error_);
  }

 private:
  Work work_;
  std::atomic<bool> finished_{false};
  std::optional<Error> error_;  // written before finished_
};

// What such a device is made of; a backend adds its own in front. In a child of fork() it is left
// alone: threads and the driver's objects are the parent's.
struct QueuedParts {
  std::shared_ptr<BufferPool> pool;
  PipelineCache pipelines;
  BuildQueue builds;  // last: its threads work on all of the above
};

class QueuedDevice : public DeviceImpl {
 public:
  // By default nothing that was freed goes back: giving memory back waits for the GPU.
  static constexpr uint64_t kKeepAll = ~uint64_t{0} >> 1;

  QueuedDevice(DeviceInfo info, std::span<const KernelUse> uses)
      : DeviceImpl(uses), info_(std::move(info)) {}

  const DeviceInfo& info() const override { return info_; }
  MemoryUse memory() const override { return queued().pool->use(); }
  uint32_t loaded_pipelines(const KernelInfo& kernel) const override {
    return queued().pipelines.count(kernel);
  }
  // The build begins at once: what a recorded step needs is built several at a time.
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) override {
    bool is_new = false;
    std::shared_ptr<const LazyPipeline> found = find_pipeline(kernel, spec, &is_new);
    if (found != nullptr && is_new) queued().builds.add(build_job(found));
    return found;
  }

 protected:
  virtual QueuedParts& queued() const = 0;
  virtual std::shared_ptr<const LazyPipeline> make_pipeline(const KernelInfo& kernel,
                                                            uint64_t spec) = 0;  // null: none

  // Null: there is none. Building it is left to the caller.
  std::shared_ptr<const LazyPipeline> find_pipeline(const KernelInfo& kernel, uint64_t spec,
                                                    bool* is_new = nullptr) {
    return std::static_pointer_cast<const LazyPipeline>(
        queued().pipelines.find_or_make(kernel, spec, [&]() -> std::shared_ptr<const Pipeline> {
          if (is_new != nullptr) *is_new = true;
          return make_pipeline(kernel, spec);
        }));
  }

 private:
  DeviceInfo info_;
};

}  // namespace gyre
