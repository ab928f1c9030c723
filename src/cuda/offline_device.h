#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "runtime/device_impl.h"

namespace gyre::cuda {

// "cuda:sm_90": compiles for GPUs that are not here into the kernel cache. Needs NVRTC, no driver
// and no GPU; has no memory and runs nothing.
bool is_offline(std::string_view name);
std::shared_ptr<DeviceImpl> open_offline(std::string_view name, const DeviceOptions& options,
                                         std::span<const KernelUse> uses);

}  // namespace gyre::cuda
