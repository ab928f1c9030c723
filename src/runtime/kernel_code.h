#pragma once
// A kernel that came with its code (gyre/custom_kernel.h) instead of a row in the backends' tables.

#include <cstring>
#include <memory>

#include "gyre/custom_kernel.h"
#include "runtime/kernel_use.h"

namespace gyre {

// Pipelines hold it: devices know kernels by the address of `info`.
struct KernelCode : std::enable_shared_from_this<KernelCode> {
  CustomCode code;
  KernelInfo info;
  std::weak_ptr<const void> handles;  // expired: nobody can record it any more
};

// Behind the caller's params, whose bytes, rounded up to words, are the spec: backends read it, the
// kernel does not.
inline CustomLaunch launch_of(const void* params, uint64_t spec) {
  CustomLaunch launch;
  std::memcpy(&launch, static_cast<const std::byte*>(params) + spec, sizeof(launch));
  return launch;
}

}  // namespace gyre
