#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "gyre/trace.h"
#include "runtime/command_list.h"

namespace gyre {

// Collects the events of one device. Off: one relaxed load per submit.
class TraceLog {
 public:
  // Spans of one command, as a backend hands them over.
  struct Timing {
    uint32_t command = 0;
    TraceSpan span;
  };

  explicit TraceLog(std::span<const KernelUse> uses = {}) : uses_(uses) {}

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void start();
  Trace stop();

  uint64_t now_ns() const;  // since the trace started
  // Which trace is on; taken before a list runs, so that one that outlives its trace is not put
  // into the next.
  uint64_t generation() const { return generation_.load(std::memory_order_relaxed); }
  // The list has run: what there is no memory for is counted as dropped.
  void add(const CommandList& list, const std::vector<Timing>& timings,
           uint64_t generation) noexcept;
  void drop(uint64_t events) noexcept;

 private:
  void add_events(const CommandList& list, const std::vector<Timing>& timings, uint64_t generation);
  void add_to_trace(const CommandList& list, uint64_t submission,
                    std::span<std::vector<TraceSpan>> spans);

  static constexpr uint64_t kMaxEvents = uint64_t{1} << 20;

  std::span<const KernelUse> uses_;
  std::atomic<bool> enabled_{false};
  std::atomic<int64_t> origin_ns_{0};
  std::atomic<uint64_t> generation_{0};
  std::mutex mutex_;
  Trace trace_;
  uint64_t submissions_ = 0;
};

}  // namespace gyre
