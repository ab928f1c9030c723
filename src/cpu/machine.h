#pragma once

#include <cstdint>
#include <string>

namespace gyre::cpu {

uint32_t usable_cores();  // what the process may run on, not what the machine has
std::string processor_name();
std::string simd_name();  // the instruction set the kernels were chosen for

}  // namespace gyre::cpu
