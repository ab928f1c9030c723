#pragma once

#include <memory>
#include <vector>

#include "runtime/device_impl.h"
#include "runtime/pipeline_cache.h"

namespace gyre {

// A device to record for, but not to run on: it plans as another one does, has addresses and no
// memory behind them, and notes which pipelines its commands would need. Nothing is built. What is
// submitted is forgotten.
class DryDevice final : public DeviceImpl {
 public:
  explicit DryDevice(std::shared_ptr<const DeviceImpl> target)
      : DeviceImpl(target->kernel_uses()), target_(std::move(target)) {}

  const std::vector<KernelKey>& needed() const { return needed_; }  // each once

  const DeviceInfo& info() const override { return target_->info(); }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override;
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void> owner) override;
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) override;
  std::string describe(const KernelInfo& kernel, uint64_t spec) const override {
    return target_->describe(kernel, spec);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    return target_->has(kernel, spec);
  }
  std::span<const uint64_t> planned_specs(const KernelInfo& kernel) const override {
    return target_->planned_specs(kernel);
  }
  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const override {
    return target_->plan(kernel, problem, plan);
  }
  uint32_t loaded_pipelines(const KernelInfo& /*kernel*/) const override { return 0; }
  std::shared_ptr<FenceState> submit(const CommandList& /*list*/) override { return nullptr; }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override;
  MemoryUse memory() const override { return {}; }
  void trim() override {}

 private:
  std::shared_ptr<const DeviceImpl> target_;
  PipelineCache pipelines_;
  std::vector<KernelKey> needed_;
  uint64_t next_address_ = kFirstAddress;

  static constexpr uint64_t kFirstAddress = 1 << 20;
};

}  // namespace gyre
