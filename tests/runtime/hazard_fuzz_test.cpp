// Random programs over overlapping bytes of a few storages, run three ways that must agree: one
// submit with the barriers the encoder found, one submit per command (a barrier after every
// command), and a plain interpreter. The same list is also replayed as a graph. Commands have
// several tasks and some of them are late, so that a missing barrier lets a later command overtake.
#include <gtest/gtest.h>

#include "runtime/random_programs.h"
#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

void interpret(const Program& program, Memory& memory) {
  interpret(program, memory, [](const Step& step, uint8_t a, uint8_t b, uint8_t out, uint64_t i) {
    return step.fold ? fold_value(out, a, i, step.salt) : mix_value(a, b, i, step.salt);
  });
}

class Machine {
 public:
  Machine(const Device& device, Memory& memory) {
    for (uint64_t view = 0; view < kViews; ++view)
      views_.push_back(device.wrap(memory[view % kMemories].data(), DType::u8, {kMemoryBytes}));
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

class HazardFuzz : public testing::TestWithParam<uint32_t> {
 protected:
  static constexpr int kPrograms = 2500;
};

TEST_P(HazardFuzz, AutomaticBarriersEqualABarrierEverywhere) {
  const Device device = open_test_device({.threads = GetParam()});
  std::mt19937 random(GetParam());
  uint64_t commands = 0, barriers = 0;
  for (int number = 0; number < kPrograms; ++number) {
    const Program program = random_program(random);
    Memory expected = start_memory();
    interpret(program, expected);

    Memory one_by_one = start_memory();
    Memory automatic = start_memory();
    const Machine careful(device, one_by_one);
    const Machine fast(device, automatic);
    Encoder single(device), whole(device);
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
