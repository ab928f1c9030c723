#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/kernel.h"
#include "runtime/device_impl.h"

namespace gyre::cuda {

std::vector<DeviceInfo> list_devices();
std::shared_ptr<DeviceImpl> open_device(std::string_view name, const DeviceOptions& options,
                                        std::span<const KernelUse> uses);

// A device with a table of its own: for tests of the runtime. Throws where the GPU cannot be used.
std::shared_ptr<DeviceImpl> make_device(int ordinal, const DeviceOptions& options,
                                        std::span<const CudaKernel> table,
                                        std::span<const KernelUse> uses = {});

}  // namespace gyre::cuda
