#pragma once

#include <functional>
#include <span>

#include "cuda/kernel_set.h"
#include "runtime/build_queue.h"
#include "runtime/device_impl.h"

namespace gyre::cuda {

// As DeviceImpl::build. `make` builds one, on a thread of the queue, and returns whether it came
// from the cache. Specs that share a kernel are one.
void build_kernels(BuildQueue& queue, const KernelSet& kernels, std::span<const KernelKey> keys,
                   const BuildCallback& built,
                   const std::function<bool(const CudaKernel& row, uint64_t spec)>& make);

}  // namespace gyre::cuda
