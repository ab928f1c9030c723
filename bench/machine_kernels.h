#pragma once
// Kernels that measure the machine itself through the same runtime: memcpy and reads for the
// bandwidth, nothing for the latency of the runtime.

#include <cstdint>

#include "gyre/device.h"
#include "gyre/encoder.h"

namespace gyre::bench {

// The CPU device with its own kernels and the two below.
Device open_cpu(uint32_t threads);

void record_memcpy(Encoder& encoder, const Tensor& source, const Tensor& target);

// Reads all of a contiguous tensor, four places at a time.
void record_read(Encoder& encoder, const Tensor& source);

// Multiplies and adds in registers, a task for each row of `sink`; returns the operations of one
// run.
uint64_t record_fma(Encoder& encoder, const Tensor& sink);

// Does nothing, in `tasks` tasks; commands that share `tensor` wait for one another.
void record_nothing(Encoder& encoder, const Tensor& tensor, uint32_t tasks);

}  // namespace gyre::bench
