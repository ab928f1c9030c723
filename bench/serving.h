#pragma once

#include "bench.h"
#include "gpu_timing.h"
#include "serving_runs.h"

namespace gyre::bench {

std::vector<Row> measure_gpu_serving(const GpuContext& gpu, const ServingRun& run,
                                     const Progress& progress);

}  // namespace gyre::bench
