#pragma once
// Random programs over overlapping bytes of a few memories, which list after list of commands and a
// plain interpreter must run alike.

#include "gyre_test.h"

namespace gyre::test {

constexpr uint64_t kMemories = 3, kMemoryBytes = 64;
constexpr uint64_t kViews = kMemories + 1;  // the last is the first memory, wrapped a second time

using Memory = std::array<std::array<uint8_t, kMemoryBytes>, kMemories>;

struct Range {
  uint64_t view = 0, begin = 0, bytes = 0;

  uint64_t memory() const { return view % kMemories; }
  bool overlaps(const Range& other) const {
    return memory() == other.memory() && begin < other.begin + other.bytes &&
           other.begin < begin + bytes && bytes != 0 && other.bytes != 0;
  }
};

struct Step {
  bool fold = false, nothing = false;
  Range a, b, out;
  uint32_t salt = 0, tasks = 0, slow_task = 0, slow_ns = 0;
};

using Program = std::vector<Step>;

inline Range random_range(std::mt19937& random) {
  const uint64_t view = random() % kViews, begin = random() % kMemoryBytes;
  return {view, begin, random() % std::min<uint64_t>(24, kMemoryBytes - begin + 1)};
}

inline Program random_program(std::mt19937& random) {
  constexpr uint32_t kTasks[] = {0, 1, 1, 2, 2, 3, 4, 5};
  Program program(2 + random() % 14);
  for (Step& step : program) {
    step.fold = random() % 2 == 0;
    step.out = random_range(random);
    // Tasks of one command run at the same time: what it reads must not be what it writes.
    do step.a = random_range(random);
    while (step.a.overlaps(step.out));
    do step.b = random_range(random);
    while (step.b.overlaps(step.out));
    step.salt = static_cast<uint32_t>(random());
    step.tasks = kTasks[random() % std::size(kTasks)];
    step.nothing = step.tasks == 0;
    step.slow_task = step.nothing ? 0 : static_cast<uint32_t>(random() % step.tasks);
    step.slow_ns = random() % 3 == 0 ? 3000 : 0;
  }
  return program;
}

inline Memory start_memory() {
  Memory memory;
  for (uint64_t m = 0; m < kMemories; ++m) {
    for (uint64_t i = 0; i < kMemoryBytes; ++i) memory[m][i] = static_cast<uint8_t>(i * 3 + m * 50);
  }
  return memory;
}

// `value(step, a, b, out, i)` is byte i of what a step writes.
template <class Value>
void interpret(const Program& program, Memory& memory, const Value& value) {
  for (const Step& step : program) {
    if (step.nothing) continue;
    const auto read = [&](const Range& range, uint64_t i) {
      return range.bytes == 0 ? uint8_t{0} : memory[range.memory()][range.begin + i % range.bytes];
    };
    for (uint64_t i = 0; i < step.out.bytes; ++i) {
      uint8_t& out = memory[step.out.memory()][step.out.begin + i];
      out = value(step, read(step.a, i), read(step.b, i), out, i);
    }
  }
}

}  // namespace gyre::test
