#pragma once
// What the handles of metal/driver.h are in the stand-in.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "metal/driver.h"
#include "metal_host/host_kernel.h"
#include "metal_host/standin_driver.h"

namespace gyre::metal {

struct Buffer {
  std::byte* contents = nullptr;
  uint64_t bytes = 0;
  uint64_t mapped = 0;            // 0: the caller's memory
  std::atomic<int64_t> users{0};  // commands that were encoded and are not done
};

struct Library {
  std::string text;
};

struct PipelineState {
  const metal_host::HostKernel* kernel = nullptr;
  std::array<uint32_t, 2> constants{};
  uint32_t max_threads = 0;
};

struct Commands {
  struct Item {
    Dispatch dispatch;
    std::vector<std::byte> params;
  };

  Queue* queue = nullptr;
  std::vector<std::vector<Item>> groups{1};  // between two barriers
  std::string error;
  bool committed = false, done = false;  // done: under the lock of State
  uint64_t gpu_ns = 0;
};

struct Queue {
  std::deque<Commands*> waiting;
  bool ends = false;
  std::thread thread;
};

}  // namespace gyre::metal

namespace gyre::metal_host {

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  StandinCounts counts;
  std::vector<std::string> violations;
  std::mt19937_64 random{1};
  uint64_t holds = 0, memory_left = uint64_t{1} << 40;
  uint64_t buffers_left = ~uint64_t{0}, begins_left = ~uint64_t{0}, commits_left = ~uint64_t{0};
  std::string commit_error, compile_log, reason;
  uint32_t max_threads = 1024;

  std::mutex running;  // host kernels run one at a time: their fibers are the process's

  void note(const std::string& violation);
};
State& state();

// Whether this call is the one that fails; with the lock held.
bool is_last(uint64_t& calls_left);

constexpr uint64_t kPageBytes = 16384;  // Apple's
constexpr uint32_t kMaxThreadgroupBytes = 32768;

// standin_queue.cpp
metal::Queue* queue_make();
void queue_free(metal::Queue* queue);
metal::Commands* begin(metal::Queue* queue);
void dispatch(metal::Commands* commands, const metal::Dispatch& dispatch);
void barrier(metal::Commands* commands);
void commit(metal::Commands* commands);
bool done(metal::Commands* commands);
void wait(metal::Commands* commands);
std::string error(metal::Commands* commands);
uint64_t gpu_ns(metal::Commands* commands);
void commands_free(metal::Commands* commands);

}  // namespace gyre::metal_host
