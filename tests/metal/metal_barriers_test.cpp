// Random programs over overlapping bytes, run with the barriers that the encoder found and compared
// with a plain interpreter. The stand-in runs what lies between two barriers in random order, so a
// barrier that is missing, or is not passed on, shows.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

#include "metal/test_kernels.h"
#include "tensor_bytes.h"
#include "test_device.h"

namespace gyre::test {
namespace {

constexpr uint64_t kMemories = 3, kBytes = 64;
constexpr uint64_t kViews = kMemories + 1;  // the last is the first memory, wrapped a second time

using Memory = std::array<std::array<uint8_t, kBytes>, kMemories>;

struct Range {
  uint64_t view = 0, begin = 0, bytes = 0;

  uint64_t memory() const { return view % kMemories; }
  bool overlaps(const Range& other) const {
    return memory() == other.memory() && begin < other.begin + other.bytes &&
           other.begin < begin + bytes;
  }
};

struct Step {
  Range a, b, out;
  uint32_t salt = 0;
  bool fold = false, nothing = false;
};

Range random_range(std::mt19937& random) {
  const uint64_t begin = random() % kBytes;
  return {random() % kViews, begin, random() % std::min<uint64_t>(24, kBytes - begin + 1)};
}

std::vector<Step> random_program(std::mt19937& random) {
  std::vector<Step> program(2 + random() % 14);
  for (Step& step : program) {
    step.out = random_range(random);
    // Threads of one dispatch run at the same time: what it reads must not be what it writes.
    do step.a = random_range(random);
    while (step.a.overlaps(step.out));
    do step.b = random_range(random);
    while (step.b.overlaps(step.out));
    step.salt = static_cast<uint32_t>(random());
    step.fold = random() % 2 == 0;
    step.nothing = random() % 8 == 0;
  }
  return program;
}

void interpret(const std::vector<Step>& program, Memory& memory) {
  for (const Step& step : program) {
    if (step.nothing) continue;
    const MixParams p{.salt = step.salt, .fold = step.fold ? 1u : 0u};
    const auto read = [&](const Range& r, uint64_t i) {
      return r.bytes == 0 ? uint8_t{0} : memory[r.memory()][r.begin + i % r.bytes];
    };
    for (uint64_t i = 0; i < step.out.bytes; ++i) {
      uint8_t& out = memory[step.out.memory()][step.out.begin + i];
      out = mixed(read(step.a, i), read(step.b, i), step.fold ? out : uint8_t{0}, i, p);
    }
  }
}

class Machine {
 public:
  explicit Machine(const Device& device) {
    for (uint64_t m = 0; m < kMemories; ++m) {
      memories_.push_back(device.tensor(DType::u8, {kBytes}));
      Bytes bytes(kBytes);
      for (uint64_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i * 3 + m * 50);
      write_bytes(memories_.back(), bytes);
      for (uint64_t i = 0; i < kBytes; ++i) expected_[m][i] = static_cast<uint8_t>(bytes[i]);
    }
    views_ = memories_;
    views_.push_back(device.wrap(address_of(memories_[0]), DType::u8, {kBytes}));
  }

  void record(Encoder& encoder, const std::vector<Step>& program) const {
    for (const Step& step : program) {
      MixCall call{.a = tensor(step.a), .b = tensor(step.b), .out = tensor(step.out)};
      call.salt = step.salt;
      call.fold = step.fold;
      if (step.nothing) call.launch.grid[0] = 0;
      record_mix(encoder, call);
    }
  }
  void expect(const std::vector<Step>& program) {
    interpret(program, expected_);
    for (uint64_t m = 0; m < kMemories; ++m) {
      const Bytes bytes = read_bytes(memories_[m]);
      for (uint64_t i = 0; i < kBytes; ++i)
        ASSERT_EQ(static_cast<uint8_t>(bytes[i]), expected_[m][i])
            << "memory " << m << " byte " << i;
    }
  }

 private:
  Tensor tensor(const Range& range) const {
    return views_[range.view].slice(0, range.begin, range.bytes);
  }

  std::vector<Tensor> memories_, views_;
  Memory expected_{};
};

TEST(MetalBarriers, RandomProgramsEqualTheInterpreter) {
  if (!is_available("metal")) GTEST_SKIP() << "no Metal device here";
  const Device device = Device::open("metal");
  std::mt19937 random(7);
  uint64_t commands = 0, barriers = 0;
  for (int number = 0; number < 1500; ++number) {
    SCOPED_TRACE(number);
    const std::vector<Step> program = random_program(random);
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
    std::vector<Step> all;
    for (int list = 0; list < 5; ++list) {
      const std::vector<Step> program = random_program(random);
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
