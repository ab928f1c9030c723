#pragma once

#include <vector>

#include "attention_runs.h"
#include "gpu_timing.h"

namespace gyre::bench {

// Refuses a run that the device has no memory for.
void check_gpu_memory(const Device& device, const AttentionRun& run);

// A row for each format of the run, told to `progress` as soon as it is measured. Runs on any
// device; the CPU has its own benchmark, which takes formats in turns.
std::vector<Row> measure_gpu_attention(const GpuContext& gpu, const AttentionRun& run,
                                       const Progress& progress);

}  // namespace gyre::bench
