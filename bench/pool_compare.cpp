// How long it takes to give every thread one empty piece of work and get it back: OpenMP, oneTBB
// and Gyre's executor, in turns. Prints microseconds, back to back and after a millisecond of
// idling. Build with -DGYRE_POOL_COMPARE=ON; the result is in docs/benchmarks.md.
#include <omp.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "timing.h"

namespace {

std::atomic<uint32_t> sink{0};

void touch() { sink.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

int main(int argc, char** argv) {
  const uint32_t threads = argc > 1 ? static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10)) : 2;
  omp_set_num_threads(static_cast<int>(threads));
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, threads);
  tbb::task_arena arena(static_cast<int>(threads));
  const gyre::Device device = gyre::bench::open_cpu(threads);
  gyre::Encoder encoder(device);
  gyre::bench::record_nothing(encoder, device.tensor(gyre::DType::u8, {64}), threads);
  const gyre::Graph graph = encoder.instantiate();

  const std::array<const char*, 3> names = {"OpenMP", "oneTBB", "Gyre"};
  const std::vector<gyre::bench::Contestant> contestants = {
      [](uint64_t) {
#pragma omp parallel
        touch();
      },
      [&](uint64_t) {
        arena.execute([&] {
          tbb::parallel_for(
              uint32_t{0}, threads, [](uint32_t) { touch(); }, tbb::static_partitioner());
        });
      },
      [&](uint64_t) { graph.replay().wait(); },
  };
  std::printf("%u threads, median us   back to back   after 1 ms idle\n", threads);
  for (size_t i = 0; i < contestants.size(); ++i) {
    // Alone: idle workers of one pool would spin on the cores of another.
    std::vector<double> hot, idle;
    for (uint64_t round = 0; round < 20000; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      contestants[i](round);
      hot.push_back(gyre::bench::us_since(begin));
    }
    for (uint64_t round = 0; round < 1000; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto begin = std::chrono::steady_clock::now();
      contestants[i](round);
      idle.push_back(gyre::bench::us_since(begin));
    }
    std::printf("%-20s %14.2f %17.2f\n", names[i], gyre::bench::median(std::move(hot)),
                gyre::bench::median(std::move(idle)));
  }
  return 0;
}
