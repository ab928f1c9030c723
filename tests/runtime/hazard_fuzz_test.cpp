// Random programs over overlapping bytes of a few storages, run three ways that must agree: one
// submit with the barriers the encoder found, one submit per command (a barrier after every
// command), and a plain interpreter. The same list is also replayed as a graph. Commands have
// several tasks and some of them are late, so that a missing barrier lets a later command overtake.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

constexpr uint64_t kMemories = 3;
constexpr uint64_t kViews =
    kMemories + 1;  // the last view is the first memory, wrapped a second time
constexpr uint64_t kBytes = 64;

using Memory = std::array<std::array<uint8_t, kBytes>, kMemories>;

struct Range {
  uint64_t view = 0;
  uint64_t begin = 0;
  uint64_t bytes = 0;

  uint64_t memory() const { return view % kMemories; }
  bool overlaps(const Range& other) const {
    return memory() == other.memory() && begin < other.begin + other.bytes &&
           other.begin < begin + bytes && bytes != 0 && other.bytes != 0;
  }
};

struct Step {
  bool fold = false;
  Range a, b, out;
  uint32_t salt = 0, tasks = 0, slow_task = 0, slow_ns = 0;
};

using Program = std::vector<Step>;

Range random_range(std::mt19937& random) {
  Range range;
  range.view = random() % kViews;
  range.begin = random() % kBytes;
  range.bytes = random() % std::min<uint64_t>(24, kBytes - range.begin + 1);
  return range;
}

Step random_step(std::mt19937& random) {
  Step step;
  step.fold = random() % 2 == 0;
  step.out = random_range(random);
  // Tasks of one command run at the same time: what it reads must not be what it writes.
  do step.a = random_range(random);
  while (step.a.overlaps(step.out));
  do step.b = random_range(random);
  while (step.b.overlaps(step.out));
  step.salt = static_cast<uint32_t>(random());
  constexpr uint32_t kTasks[] = {0, 1, 1, 2, 2, 3, 4, 5};
  step.tasks = kTasks[random() % std::size(kTasks)];
  step.slow_task = step.tasks == 0 ? 0 : static_cast<uint32_t>(random() % step.tasks);
  step.slow_ns = random() % 3 == 0 ? 3000 : 0;
  return step;
}

Program random_program(std::mt19937& random) {
  Program program(2 + random() % 14);
  for (Step& step : program) step = random_step(random);
  return program;
}

void interpret(const Program& program, Memory& memory) {
  for (const Step& step : program) {
    if (step.tasks == 0) continue;
    const auto read = [&](const Range& range, uint64_t i) {
      return range.bytes == 0 ? uint8_t{0} : memory[range.memory()][range.begin + i % range.bytes];
    };
    for (uint64_t i = 0; i < step.out.bytes; ++i) {
      uint8_t& out = memory[step.out.memory()][step.out.begin + i];
      out = step.fold ? fold_value(out, read(step.a, i), i, step.salt)
                      : mix_value(read(step.a, i), read(step.b, i), i, step.salt);
    }
  }
}

class Machine {
 public:
  Machine(const Device& device, Memory& memory) {
    for (uint64_t view = 0; view < kViews; ++view) {
      views_.push_back(device.wrap(memory[view % kMemories].data(), DType::u8, {kBytes}));
    }
  }

  void record(Encoder& encoder, const Step& step) const {
    const BytesCall call{.a = tensor(step.a),
                         .b = tensor(step.b),
                         .out = tensor(step.out),
                         .salt = step.salt,
                         .tasks = step.tasks,
                         .slow_task = step.slow_task,
                         .slow_ns = step.slow_ns};
    if (step.fold) {
      record_fold(encoder, call);
    } else {
      record_mix(encoder, call);
    }
  }

 private:
  Tensor tensor(const Range& range) const {
    return views_[range.view].slice(0, range.begin, range.bytes);
  }

  std::vector<Tensor> views_;
};

Memory start_memory() {
  Memory memory;
  for (uint64_t m = 0; m < kMemories; ++m) {
    for (uint64_t i = 0; i < kBytes; ++i) memory[m][i] = static_cast<uint8_t>(i * 3 + m * 50);
  }
  return memory;
}

class HazardFuzz : public testing::TestWithParam<uint32_t> {
 protected:
  static constexpr int kPrograms = 2500;
};

TEST_P(HazardFuzz, AutomaticBarriersEqualABarrierEverywhere) {
  const Device device = open_test_device({.threads = GetParam()});
  std::mt19937 random(GetParam());
  uint64_t commands = 0;
  uint64_t barriers = 0;
  for (int number = 0; number < kPrograms; ++number) {
    const Program program = random_program(random);
    Memory expected = start_memory();
    interpret(program, expected);

    Memory one_by_one = start_memory();
    Memory automatic = start_memory();
    const Machine careful(device, one_by_one);
    const Machine fast(device, automatic);
    Encoder single(device);
    Encoder whole(device);
    for (const Step& step : program) {
      careful.record(single, step);
      single.submit().wait();
      fast.record(whole, step);
    }
    commands += whole.size();
    barriers += whole.barriers();
    whole.submit().wait();
    ASSERT_EQ(one_by_one, expected) << "program " << number;
    ASSERT_EQ(automatic, expected) << "program " << number;
  }
  // Neither of the two trivial answers.
  EXPECT_GT(barriers, commands / 10);
  EXPECT_LT(barriers, commands * 9 / 10);
}

TEST_P(HazardFuzz, ReplaysEqualTheInterpreter) {
  const Device device = open_test_device({.threads = GetParam()});
  std::mt19937 random(GetParam() + 100);
  for (int number = 0; number < kPrograms; ++number) {
    const Program program = random_program(random);
    Memory expected = start_memory();
    Memory replayed = start_memory();
    const Machine machine(device, replayed);
    Encoder encoder(device);
    for (const Step& step : program) machine.record(encoder, step);
    const Graph graph = encoder.instantiate();
    for (int replay = 0; replay < 2; ++replay) {
      interpret(program, expected);
      graph.replay().wait();
      ASSERT_EQ(replayed, expected) << "program " << number << " replay " << replay;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, HazardFuzz, testing::Values(1u, 2u, 3u),
                         [](const auto& test) { return std::to_string(test.param); });

}  // namespace
}  // namespace gyre::test
