#pragma once

#include <cstdint>

namespace gyre::bench {

// Multiplies and adds in registers for some microseconds; returns the operations done.
uint64_t run_fma(float* sink);

}  // namespace gyre::bench
