// What the runtime costs: recording, replaying, waking the threads.
#include <algorithm>
#include <thread>

#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "timing.h"

namespace gyre::bench {
namespace {

struct Latency {
  const char* name;
  double limit_us;
  double (*measure_us)(const Device&, const Options&);
};

double record_us(const Device& device, const Options& options) {
  // One token of K and V per layer, as a decode step records it.
  constexpr uint32_t kLayers = 32, kPositions = 2;
  const Tensor k = device.tensor(DType::f32, {1, 8, 128});
  const Tensor v = device.tensor(DType::f32, {1, 8, 128});
  std::vector<KvCopyInputs> layers;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const Tensor k_cache = device.tensor(DType::f16, {8, 16, 128}).permute({1, 0, 2});
    const Tensor v_cache = device.tensor(DType::f16, {8, 16, 128}).permute({1, 0, 2});
    layers.push_back({k, k_cache, v, v_cache});
  }
  Encoder encoder(device);
  const auto record = [&](uint64_t /*round*/) {
    for (uint64_t position = 0; position < kPositions; ++position) {
      for (const KvCopyInputs& layer : layers) kv_copy(encoder, layer, {.position = position});
    }
    encoder.clear();
  };
  return medians_us({record}, options.seconds_per_row())[0] / (kLayers * kPositions);
}

double replay_us(const Device& device, const Options& options, uint32_t tasks) {
  constexpr uint32_t kCommands = 60;
  const Tensor tensor = device.tensor(DType::u8, {64});
  Encoder encoder(device);
  for (uint32_t i = 0; i < kCommands; ++i) record_nothing(encoder, tensor, tasks);
  const Graph graph = encoder.instantiate();
  const auto replay = [&](uint64_t /*round*/) { graph.replay().wait(); };
  return medians_us({replay}, options.seconds_per_row())[0] / kCommands;
}

double replay_chain_us(const Device& device, const Options& options) {
  return replay_us(device, options, 1);
}

double replay_shared_us(const Device& device, const Options& options) {
  return replay_us(device, options, device.info().compute_units);
}

double submit_us(const Device& device, const Options& options) {
  const Tensor tensor = device.tensor(DType::u8, {64});
  Encoder encoder(device);
  const auto submit = [&](uint64_t /*round*/) {
    record_nothing(encoder, tensor, device.info().compute_units);
    encoder.submit().wait();
  };
  return medians_us({submit}, options.seconds_per_row())[0];
}

// After a pause long enough for the workers to have gone to sleep.
double submit_idle_us(const Device& device, const Options& options) {
  const Tensor tensor = device.tensor(DType::u8, {64});
  Encoder encoder(device);
  std::vector<double> times;
  const auto start = std::chrono::steady_clock::now();
  while (us_since(start) < options.seconds_per_row() * 1e6) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    record_nothing(encoder, tensor, device.info().compute_units);
    const auto begin = std::chrono::steady_clock::now();
    encoder.submit().wait();
    times.push_back(us_since(begin));
  }
  return median(std::move(times));
}

constexpr Latency kLatencies[] = {
    {"record one kv_copy", 0.1, record_us},
    {"replay, per command, one task each", 1.0, replay_chain_us},
    {"replay, per command, a task per thread", 1.0, replay_shared_us},
    {"submit and wait, a task per thread", 10.0, submit_us},
    {"submit and wait after 1 ms idle", 0.0, submit_idle_us},
};

}  // namespace

std::vector<Row> run_runtime(const Options& options, const Progress& progress) {
  std::vector<Row> rows;
  const Device device = open_cpu(options.cpu_threads());
  for (const Latency& latency : kLatencies) {
    progress.begin(std::string("runtime ") + latency.name);
    Row row = make_row(options, device, "runtime", {{"case", std::string(latency.name)}},
                       latency.measure_us(device, options));
    row.limit_us = latency.limit_us;
    row.fraction = latency.limit_us > 0 ? row.median_us / latency.limit_us : 0;
    progress.done(row);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace gyre::bench
