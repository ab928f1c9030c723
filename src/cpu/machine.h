#pragma once

#include <cstdint>
#include <string>

namespace gyre::cpu {

// What the process may run on, not what the machine has: its affinity mask, and a container's
// quota.
uint32_t usable_cores();
std::string processor_name();
std::string simd_name();  // the instruction set the kernels were chosen for

}  // namespace gyre::cpu
