// Random programs over overlapping bytes, run with the barriers that the encoder found and compared
// with a plain interpreter. The stand-in runs what lies between two barriers in random order, so a
// barrier that is missing, or is not passed on, shows.
#include <gtest/gtest.h>

#include "metal/test_kernels.h"
#include "runtime/random_programs.h"
#include "tensor_bytes.h"
#include "test_device.h"

namespace gyre::test {
namespace {

void interpret(const Program& program, Memory& memory) {
  interpret(program, memory, [](const Step& step, uint8_t a, uint8_t b, uint8_t out, uint64_t i) {
    const MixParams p{.salt = step.salt, .fold = step.fold ? 1u : 0u};
    return mixed(a, b, step.fold ? out : uint8_t{0}, i, p);
  });
}

class Machine {
 public:
  explicit Machine(const Device& device) {
    for (const auto& bytes : expected_) {
      memories_.push_back(device.tensor(DType::u8, {kMemoryBytes}));
      memories_.back().write_from(std::span<const uint8_t>(bytes));
    }
    views_ = memories_;
    views_.push_back(device.wrap(address_of(memories_[0]), DType::u8, {kMemoryBytes}));
  }

  void record(Encoder& encoder, const Program& program) const {
    for (const Step& step : program) {
      MixCall call{.a = tensor(step.a), .b = tensor(step.b), .out = tensor(step.out)};
      call.salt = step.salt;
      call.fold = step.fold;
      if (step.nothing) call.launch.grid[0] = 0;
      record_mix(encoder, call);
    }
  }
  void expect(const Program& program) {
    interpret(program, expected_);
    for (uint64_t m = 0; m < kMemories; ++m) {
      const Bytes bytes = read_bytes(memories_[m]);
      for (uint64_t i = 0; i < kMemoryBytes; ++i)
        ASSERT_EQ(static_cast<uint8_t>(bytes[i]), expected_[m][i])
            << "memory " << m << " byte " << i;
    }
  }

 private:
  Tensor tensor(const Range& range) const {
    return views_[range.view].slice(0, range.begin, range.bytes);
  }

  std::vector<Tensor> memories_, views_;
  Memory expected_ = start_memory();
};

TEST(MetalBarriers, RandomProgramsEqualTheInterpreter) {
  if (!is_available("metal")) GTEST_SKIP() << "no Metal device here";
  const Device device = Device::open("metal");
  std::mt19937 random(7);
  uint64_t commands = 0, barriers = 0;
  for (int number = 0; number < 1500; ++number) {
    SCOPED_TRACE(number);
    const Program program = random_program(random);
    Machine machine(device);
    Encoder encoder(device);
    machine.record(encoder, program);
    commands += encoder.size();
    barriers += encoder.barriers();
    if (number % 2 == 0) {
      encoder.submit();
      machine.expect(program);
    } else {
      const Graph graph = encoder.instantiate();
      for (int replay = 0; replay < 2; ++replay) {
        graph.replay();
        machine.expect(program);
      }
    }
    if (HasFatalFailure()) return;
  }
  // Neither of the two trivial answers.
  EXPECT_GT(barriers, commands / 10);
  EXPECT_LT(barriers, commands * 9 / 10);
}

// Lists follow one another without a wait between them.
TEST(MetalBarriers, ListsRunInTheOrderOfTheirSubmits) {
  if (!is_available("metal")) GTEST_SKIP() << "no Metal device here";
  const Device device = Device::open("metal");
  std::mt19937 random(8);
  for (int number = 0; number < 100; ++number) {
    Machine machine(device);
    Program all;
    for (int list = 0; list < 5; ++list) {
      const Program program = random_program(random);
      Encoder encoder(device);
      machine.record(encoder, program);
      encoder.submit();
      all.insert(all.end(), program.begin(), program.end());
    }
    machine.expect(all);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace gyre::test
