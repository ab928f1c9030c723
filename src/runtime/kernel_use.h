#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "abi/kernel.h"

namespace gyre {

// What the ops say about a kernel they dispatch, for traces and listings. The ops have the table
// (ops/table.cpp); the composition root (devices.cpp) hands it to each device.
struct KernelUse {
  const KernelInfo* kernel = nullptr;
  std::string (*shape)(const void* params) = nullptr;  // the sizes in Params, as traces print them
  std::span<const uint64_t> (*specs)() = nullptr;  // every Spec an op can ask for; null: a device's
                                                   // plans ask, and the device lists them
};

// "" where `uses` does not have the kernel.
std::string shape_of(std::span<const KernelUse> uses, const KernelInfo& kernel, const void* params);

}  // namespace gyre
