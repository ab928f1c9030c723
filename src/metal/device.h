#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "metal/kernel.h"
#include "runtime/device_impl.h"

namespace gyre::metal {

std::vector<DeviceInfo> list_devices();
std::shared_ptr<DeviceImpl> open_device(std::string_view name, const DeviceOptions& options,
                                        std::span<const KernelUse> uses);

// A device with a table of its own: for tests of the runtime. Throws where there is no GPU.
std::shared_ptr<DeviceImpl> make_device(const DeviceOptions& options,
                                        std::span<const MetalKernel> table,
                                        std::span<const KernelUse> uses = {});

}  // namespace gyre::metal
