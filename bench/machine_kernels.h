#pragma once
// Kernels that measure the machine itself through the same runtime: memcpy for the bandwidth,
// nothing for the latency of the runtime.

#include <cstdint>

#include "gyre/device.h"
#include "gyre/encoder.h"

namespace gyre::bench {

// The CPU device with its own kernels and the two below.
Device open_cpu(uint32_t threads);

void record_memcpy(Encoder& encoder, const Tensor& source, const Tensor& target);

// Does nothing, in `tasks` tasks; commands that share `tensor` wait for one another.
void record_nothing(Encoder& encoder, const Tensor& tensor, uint32_t tasks);

}  // namespace gyre::bench
