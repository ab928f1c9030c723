#pragma once

#include <string>

namespace gyre::bench {

// The SIMD instruction sets the kernels are built for; the processor decides which of them runs.
std::string simd_targets();

}  // namespace gyre::bench
