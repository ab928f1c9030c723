#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cpu/kernel.h"
#include "runtime/device_impl.h"

namespace gyre::cpu {

struct CpuPipeline final : Pipeline {
  const CpuKernel* row;
  TaskFn run;

  CpuPipeline(const KernelInfo& info, const CpuKernel& table_row, uint64_t key, TaskFn fn)
      : Pipeline(info, key), row(&table_row), run(fn) {}
};

std::span<const CpuKernel> kernel_table();

std::vector<DeviceInfo> list_devices();
std::shared_ptr<DeviceImpl> open_device(std::string_view name, const DeviceOptions& options,
                                        std::span<const KernelUse> uses);

// A device with a table of its own: for tests and benchmarks of the runtime.
std::shared_ptr<DeviceImpl> make_device(const DeviceOptions& options,
                                        std::span<const CpuKernel> table,
                                        std::span<const KernelUse> uses = {});

}  // namespace gyre::cpu
