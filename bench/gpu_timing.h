#pragma once
// How a GPU is timed: graphs of many commands, divided, because a launch alone takes longer than
// some kernels. They go round sets of buffers that together leave the GPU's cache behind.

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "gyre/device.h"
#include "gyre/encoder.h"
#include "gyre/graph.h"
#include "timing.h"

namespace gyre::bench {

// What the rows of one run have in common.
struct GpuContext {
  Device device;
  std::string name;       // as it was asked for
  double limit_gbps = 0;  // what the device copies, both ways counted
};

// How many sets of `bytes` a measurement goes round.
uint64_t sets_for(uint64_t bytes);

// Commands of a graph, each of at least so many microseconds, that go over all sets alike: up to 2
// ms, so that launching it and waiting for it no longer count.
uint64_t commands_for(double least_us, uint64_t sets);

// Median microseconds of one of the `count` commands of a graph.
double replay_us(const Graph& graph, uint64_t count);

// f16 [tokens, heads, head_dim] from N(0,1).
Tensor noise_tokens(const Device& device, uint64_t tokens, uint64_t heads, uint64_t head_dim,
                    DType dtype = DType::f16);
// The dtype of a model's queries over such a cache.
inline DType query_dtype(KvFormat k) { return k == KvFormat::bf16 ? DType::bf16 : DType::f16; }

Row gpu_row(const GpuContext& gpu, const std::string& op, Shape shape, double us, uint64_t bytes);

// Median microseconds of one command: of a graph, where commands that do not depend on each other
// may overlap, and submitted, where each runs when the one before has ended.
struct CommandTimes {
  double replayed = 0, submitted = 0;
};

// record(encoder, i) records a command on set i < sets; it goes round the sets.
template <class Record>
CommandTimes time_commands(const Device& device, uint64_t sets, const Record& record) {
  constexpr int kRounds = 9;
  const uint64_t count = commands_for(1, sets);
  Encoder encoder(device);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    for (uint64_t i = 0; i < count; ++i) record(encoder, i % sets);
    const auto begin = std::chrono::steady_clock::now();
    encoder.submit().wait();
    if (round > 1) times.push_back(us_since(begin) / static_cast<double>(count));
  }
  for (uint64_t i = 0; i < count; ++i) record(encoder, i % sets);
  return {replay_us(encoder.instantiate(), count), median(std::move(times))};
}

}  // namespace gyre::bench
