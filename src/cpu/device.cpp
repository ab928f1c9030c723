#include "cpu/device.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/executor.h"
#include "cpu/machine.h"
#include "cpu/memory.h"
#include "runtime/buffer_pool.h"
#include "runtime/cpu_quota.h"
#include "runtime/launches.h"
#include "runtime/pipeline_cache.h"
#include "runtime/require.h"

namespace gyre::cpu {
namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint64_t kPoolLimit = 256u << 20;

uint32_t thread_count(const DeviceOptions& options) {
  uint32_t threads = options.threads;
  if (const char* text = std::getenv("GYRE_THREADS");
      threads == 0 && text != nullptr && *text != '\0') {
    const std::string_view view(text);
    const auto [end, error] = std::from_chars(view.begin(), view.end(), threads);
    require(error == std::errc() && end == view.end() && threads != 0,
            "device.open: GYRE_THREADS must be a number from 1 to ", kMaxThreads, ", got \"", text,
            "\"");
  }
  if (threads == 0) threads = usable_cores();
  require(threads <= kMaxThreads, "device.open: at most ", kMaxThreads, " threads, got ", threads);
  return threads;
}

DeviceInfo describe_machine(uint32_t threads) {
  DeviceInfo info;
  info.name = "cpu";
  info.available = true;
  info.description = join(processor_name(), ", ", simd_name());
  info.compute_units = threads;
  info.memory_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                      static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  return info;
}

// Every kernel that comes with its code.
constexpr CpuKernel kCustom = {
    .tasks = [](const void* params, uint64_t spec) { return launch_of(params, spec).tasks; }};

class WrappedStorage final : public Storage {
 public:
  WrappedStorage(uint64_t device_id, const Block& block, std::shared_ptr<void> owner)
      : Storage(device_id, block), owner_(std::move(owner)) {}

 private:
  std::shared_ptr<void> owner_;
};

// Plans that no submit uses keep their memory: steady-state submits allocate nothing. The device's
// and not the threads', whose are gone when a program that ends submits once more.
class Plans {
 public:
  std::unique_ptr<Plan> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.reserve(made_ + 1);  // give() takes no memory
      auto plan = std::make_unique<Plan>();
      ++made_;
      return plan;
    }
    std::unique_ptr<Plan> plan = std::move(free_.back());
    free_.pop_back();
    return plan;
  }
  void give(std::unique_ptr<Plan> plan) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(plan));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Plan>> free_;
  size_t made_ = 0;
};

class TakenPlan {
 public:
  explicit TakenPlan(Plans& plans) : plans_(plans), plan_(plans.take()) {}
  TakenPlan(const TakenPlan&) = delete;
  TakenPlan& operator=(const TakenPlan&) = delete;
  ~TakenPlan() { plans_.give(std::move(plan_)); }
  Plan* operator->() const { return plan_.get(); }
  const Plan& operator*() const { return *plan_; }

 private:
  Plans& plans_;
  std::unique_ptr<Plan> plan_;
};

class CpuDevice final : public DeviceImpl {
 public:
  CpuDevice(const DeviceOptions& options, std::span<const CpuKernel> table,
            std::span<const KernelUse> uses)
      : DeviceImpl(uses),
        info_(describe_machine(thread_count(options))),
        table_(table),
        pool_(std::make_shared<BufferPool>(id(), host_memory(),
                                           options.pool_limit_bytes.value_or(kPoolLimit))),
        executor_(info_.compute_units, options.spin_us, options.poll) {}

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override { return pool_->allocate(bytes); }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void> owner) override {
    return std::make_shared<WrappedStorage>(id(), block, std::move(owner));
  }
  MemoryUse memory() const override { return pool_->use(); }
  void trim() override {
    pool_->trim();
    pipelines_.trim();
  }

  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) override {
    return pipelines_.find_or_make(kernel, spec, [&]() -> std::unique_ptr<Pipeline> {
      const CpuKernel* row = find(kernel);
      const TaskFn task = row != nullptr ? select(*row, kernel, spec) : nullptr;
      return task != nullptr ? std::make_unique<CpuPipeline>(kernel, *row, spec, task) : nullptr;
    });
  }
  std::string describe(const KernelInfo& kernel, uint64_t spec) const override {
    const CpuKernel* row = find(kernel);
    require(row != nullptr && select(*row, kernel, spec) != nullptr, "device.describe: no kernel ",
            kernel.name, " for this spec");
    return row->describe != nullptr ? row->describe(spec) : join(kernel.name);
  }
  uint32_t loaded_pipelines(const KernelInfo& kernel) const override {
    return pipelines_.count(kernel);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    const CpuKernel* row = find(kernel);
    return row != nullptr && select(*row, kernel, spec) != nullptr;
  }

  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const override {
    const CpuKernel* row = find(kernel);
    return row != nullptr && row->plan != nullptr && row->plan(problem, info_, plan);
  }

  // Runs before it returns: with every core computing there is nothing to overlap with, and handing
  // the list to another thread would cost more than most lists.
  std::shared_ptr<FenceState> submit(const CommandList& list) override {
    Executor::require_outside_lists("encoder.submit");
    const TakenPlan plan(plans_);
    plan->build(list);
    executor_.reserve(*plan);
    return run(*plan, list);
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override;

  void reserve(const Plan& plan) { executor_.reserve(plan); }
  // Once it runs, it succeeds: what a trace has no memory for is counted as dropped.
  std::shared_ptr<FenceState> run(const Plan& plan, const CommandList& list) {
    note_launch();  // from here on only DeviceOptions::poll throws, and in the middle
    if (!trace().enabled()) {
      executor_.run(plan, nullptr, nullptr);
      return nullptr;
    }
    const uint64_t generation = trace().generation();
    std::vector<TraceLog::Timing> timings;
    if (executor_.run(plan, &trace(), &timings)) {
      trace().add(list, timings, generation);
    } else {
      trace().drop(list.commands.size());
    }
    return nullptr;
  }

 private:
  // Null: there is none.
  const CpuKernel* find(const KernelInfo& kernel) const {
    if (kernel.code != nullptr) return kernel.code->code.cpu != nullptr ? &kCustom : nullptr;
    const auto row = std::find_if(table_.begin(), table_.end(),
                                  [&](const CpuKernel& k) { return k.info == &kernel; });
    return row != table_.end() ? &*row : nullptr;
  }

  static TaskFn select(const CpuKernel& row, const KernelInfo& kernel, uint64_t spec) {
    return kernel.code != nullptr ? kernel.code->code.cpu : row.select(spec);
  }

  DeviceInfo info_;
  std::span<const CpuKernel> table_;
  std::shared_ptr<BufferPool> pool_;
  PipelineCache pipelines_;
  Plans plans_;
  Executor executor_;
};

// Holds no reference to the device: the public Graph does.
class CpuGraph final : public GraphImpl {
 public:
  CpuGraph(CpuDevice& device, CommandList list) : device_(device), list_(std::move(list)) {
    Executor::require_outside_lists("encoder.instantiate");
    plan_.build(list_);
    device_.reserve(plan_);
  }
  std::shared_ptr<FenceState> replay() override {
    Executor::require_outside_lists("graph.replay");
    return device_.run(plan_, list_);
  }
  uint32_t size() const override { return static_cast<uint32_t>(list_.commands.size()); }

 private:
  CpuDevice& device_;
  CommandList list_;
  Plan plan_;
};

std::unique_ptr<GraphImpl> CpuDevice::instantiate(CommandList list) {
  return std::make_unique<CpuGraph>(*this, std::move(list));
}

}  // namespace

std::vector<DeviceInfo> list_devices() { return {describe_machine(usable_cores())}; }

std::shared_ptr<DeviceImpl> make_device(const DeviceOptions& options,
                                        std::span<const CpuKernel> table,
                                        std::span<const KernelUse> uses) {
  return std::make_shared<CpuDevice>(options, table, uses);
}

std::shared_ptr<DeviceImpl> open_device(std::string_view name, const DeviceOptions& options,
                                        std::span<const KernelUse> uses) {
  require(name == "cpu", "device.open: the CPU is one device, called \"cpu\", got \"", name, "\"");
  return make_device(options, kernel_table(), uses);
}

}  // namespace gyre::cpu
