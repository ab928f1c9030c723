#pragma once

#include "gyre/device.h"

namespace gyre::cpu {

// CpuKernel::plan of attention: how many splits of the keys. The same for every count of threads,
// so that results do not depend on it.
bool plan_attention(const void* problem, const DeviceInfo& device, void* plan);

}  // namespace gyre::cpu
