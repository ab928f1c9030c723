#pragma once
// operator new that counts, and fails where a test wants it to. In one file of a program.

#include <atomic>
#include <cstdint>

namespace gyre::test {

// Allocations are counted, and may fail, while it is on.
struct FailingMemory {
  std::atomic<bool> on{false};
  std::atomic<uint64_t> count{0};
  // Allocations [first, first + fails) fail, counted from 0.
  std::atomic<uint64_t> first{~uint64_t{0}};
  std::atomic<uint64_t> fails{0};
  std::atomic<uint64_t> failed{0};

  void arm(uint64_t at, uint64_t how_many) {
    count = failed = 0;
    first = at;
    fails = how_many;
  }
  void count_from_here() {
    arm(0, 0);
    on = true;
  }
  uint64_t stop() {
    on = false;
    return count;
  }
  bool refuses() {
    if (!on.load(std::memory_order_relaxed)) return false;
    const uint64_t index = count.fetch_add(1);
    const bool fail = index >= first.load() && index - first.load() < fails.load();
    if (fail) failed.fetch_add(1);
    return fail;
  }
};

FailingMemory& failing_memory();

// While there is one, allocation `at` and the next ones fail, counted from its beginning.
struct FailingAllocations {
  explicit FailingAllocations(uint64_t at, uint64_t how_many = 1) {
    failing_memory().arm(at, how_many);
    failing_memory().on = true;
  }
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;
  ~FailingAllocations() { failing_memory().on = false; }
};

}  // namespace gyre::test
