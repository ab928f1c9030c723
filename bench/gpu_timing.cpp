#include "gpu_timing.h"

#include <algorithm>

#include "gyre/gyre.h"
#include "noise.h"

namespace gyre::bench {

uint64_t sets_for(uint64_t bytes) {
  constexpr uint64_t kBeyondCache = 256u << 20;  // bytes that leave any GPU's cache behind
  return std::clamp<uint64_t>(kBeyondCache / std::max<uint64_t>(bytes, 1) + 1, 2, 64);
}

uint64_t commands_for(double least_us, uint64_t sets) {
  constexpr double kGraph = 2000;
  const auto count = static_cast<uint64_t>(std::clamp(kGraph / least_us, 16.0, 128.0));
  return (count + sets - 1) / sets * sets;
}

double replay_us(const Graph& graph, uint64_t count) {
  constexpr int kRounds = 25;
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    graph.replay().wait();
    if (round > 3) times.push_back(us_since(begin) / static_cast<double>(count));
  }
  return median(std::move(times));
}

Tensor noise_tokens(const Device& device, uint64_t tokens, uint64_t heads, uint64_t head_dim,
                    DType dtype) {
  const Tensor wide = noise(device, {tokens, heads, head_dim}, 1);
  Tensor half = device.tensor(dtype, {tokens, heads, head_dim});
  Encoder encoder(device);
  kv_copy(encoder, {.k = wide, .k_cache = half});
  encoder.submit().wait();
  return half;
}

Row gpu_row(const GpuContext& gpu, const std::string& op, Shape shape, double us, uint64_t bytes) {
  Row row;
  row.op = op;
  row.device = gpu.name;
  row.threads = gpu.device.info().compute_units;
  row.shape = std::move(shape);
  row.median_us = us;
  row.set_limit(bytes, gpu.limit_gbps);
  return row;
}

}  // namespace gyre::bench
