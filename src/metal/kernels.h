#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "metal/kernel.h"

namespace gyre::metal {

std::span<const MetalKernel> kernel_table();

}  // namespace gyre::metal
