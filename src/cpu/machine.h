#pragma once

#include <string>

namespace gyre::cpu {

std::string processor_name();
std::string simd_name();  // the instruction set the kernels were chosen for

}  // namespace gyre::cpu
