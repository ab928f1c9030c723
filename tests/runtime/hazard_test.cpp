#include "runtime/hazard.h"

#include "gyre_test.h"

namespace gyre::test {
namespace {

bool add(HazardTracker& tracker, std::vector<RangeAccess> accesses) {
  return tracker.add(accesses);
}

// Commands of one access each, and whether a barrier comes before them.
struct HazardCase {
  const char* name;
  struct Command {
    uint64_t begin, end;
    Access access;
    bool barrier;
  };
  std::vector<Command> commands;
};

class Hazards : public testing::TestWithParam<HazardCase> {};

TEST_P(Hazards, AreSeen) {
  HazardTracker tracker;
  for (const auto& [begin, end, access, barrier] : GetParam().commands)
    EXPECT_EQ(add(tracker, {{{begin, end}, access}}), barrier) << begin << " to " << end;
}

constexpr uint64_t kTop = ~uint64_t{0};
constexpr Access kRead = Access::read, kWrite = Access::write, kBoth = Access::read_write;
const HazardCase kHazards[] = {
    {"ReadAfterWrite", {{10, 20, kWrite, false}, {19, 30, kRead, true}}},
    {"WriteAfterRead", {{10, 20, kRead, false}, {0, 11, kWrite, true}}},
    {"WriteAfterWrite", {{10, 20, kWrite, false}, {12, 13, kWrite, true}}},
    {"ReadWriteIsBoth", {{10, 20, kBoth, false}, {15, 16, kRead, true}, {15, 16, kBoth, true}}},
    {"ReadsNeverConflict", std::vector<HazardCase::Command>(10, {10, 20, kRead, false})},
    {"TouchingRanges", {{10, 20, kWrite, false}, {20, 30, kWrite, false}, {0, 10, kRead, false}}},
    {"EmptyRanges", {{10, 20, kWrite, false}, {15, 15, kWrite, false}, {0, 0, kRead, false}}},
    {"ABarrierStartsANewGroup",  // it orders the last one already
     {{0, 10, kWrite, false},
      {20, 30, kWrite, false},
      {0, 1, kRead, true},
      {20, 30, kRead, false}}},
    {"TheEndOfMemory",
     {{kTop - 8, kTop, kWrite, false}, {0, 8, kWrite, false}, {kTop - 1, kTop, kRead, true}}}};

INSTANTIATE_TEST_SUITE_P(Of, Hazards, testing::ValuesIn(kHazards),
                         [](const auto& at) { return at.param.name; });

TEST(Hazard, AGroupMayBeLong) {
  constexpr uint64_t kRanges = 400;
  HazardTracker tracker;
  // 7 and 400 share no factor: every range once, in no order.
  for (uint64_t i = 0; i < kRanges; ++i) {
    const uint64_t at = i * 7 % kRanges * 10;
    ASSERT_FALSE(add(tracker, {{{at, at + 9}, Access::write}}));
  }
  for (uint64_t i = 0; i < kRanges; ++i) {
    const HazardTracker::Mark mark = tracker.mark();
    ASSERT_FALSE(add(tracker, {{{i * 10 + 9, i * 10 + 10}, Access::write}}))
        << "between two ranges";
    tracker.rollback(mark);
    if (i % 50 != 0) continue;
    ASSERT_TRUE(add(tracker, {{{i * 10 + 8, i * 10 + 10}, Access::read}}));
    tracker.rollback(mark);
  }
}

// Makes the same decision one byte at a time.
class ByteOracle {
 public:
  static constexpr uint64_t kBytes = 96;

  bool conflicts(const std::vector<RangeAccess>& accesses) const {
    for (const RangeAccess& access : accesses) {
      for (uint64_t i = access.range.begin; i < access.range.end; ++i) {
        if (written_[i] || (access.access != Access::read && touched_[i])) return true;
      }
    }
    return false;
  }
  void start_group() { *this = {}; }
  void record(const std::vector<RangeAccess>& accesses) {
    for (const RangeAccess& access : accesses) {
      for (uint64_t i = access.range.begin; i < access.range.end; ++i) {
        touched_[i] = true;
        if (access.access != Access::read) written_[i] = true;
      }
    }
  }

 private:
  std::array<bool, kBytes> touched_{}, written_{};
};

std::vector<RangeAccess> random_accesses(std::mt19937& random, uint64_t longest) {
  std::vector<RangeAccess> accesses(random() % (kMaxArgs + 1));
  for (RangeAccess& access : accesses) {
    const uint64_t begin = random() % ByteOracle::kBytes, length = random() % (longest + 1);
    access.range = {begin, std::min(begin + length, ByteOracle::kBytes)};
    // Mostly reads, or every group would end at once.
    constexpr Access kMix[] = {Access::read, Access::read, Access::read, Access::write,
                               Access::read_write};
    access.access = kMix[random() % 5];
  }
  return accesses;
}

class HazardOracle : public testing::TestWithParam<uint64_t> {};

TEST_P(HazardOracle, BarrierExactlyWhenAByteConflicts) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  uint64_t conflicts = 0, free_commands = 0;
  for (int round = 0; round < 200; ++round) {
    HazardTracker tracker;
    ByteOracle oracle;
    for (int command = 0; command < 100; ++command) {
      const std::vector<RangeAccess> accesses = random_accesses(random, GetParam());
      const bool expected = oracle.conflicts(accesses), barrier = tracker.add(accesses);
      ASSERT_EQ(barrier, expected) << "round " << round << " command " << command;
      if (barrier) oracle.start_group();
      oracle.record(accesses);
      ++(expected ? conflicts : free_commands);
    }
  }
  EXPECT_GT(conflicts, 1000u);
  EXPECT_GT(free_commands, 1000u);
}

INSTANTIATE_TEST_SUITE_P(RangeLengths, HazardOracle, testing::Values(1, 2, 6, 20));

// Going back leaves the tracker as if the commands in between had never been.
TEST(Hazard, RollbackForgets) {
  std::mt19937 random(11);
  for (int round = 0; round < 500; ++round) {
    HazardTracker tracker;
    HazardTracker twin;
    for (int command = 0; command < 40; ++command) {
      if (random() % 3 == 0) {
        const HazardTracker::Mark mark = tracker.mark();
        for (int i = 0; i < 4; ++i) tracker.add(random_accesses(random, 6));
        tracker.rollback(mark);
      }
      const std::vector<RangeAccess> accesses = random_accesses(random, 4);
      ASSERT_EQ(tracker.add(accesses), twin.add(accesses)) << "round " << round;
    }
  }
}

TEST(Hazard, ClearForgetsEverything) {
  HazardTracker tracker;
  EXPECT_FALSE(add(tracker, {{{0, 10}, Access::write}}));
  EXPECT_TRUE(add(tracker, {{{0, 10}, Access::write}}));
  tracker.clear();
  EXPECT_FALSE(add(tracker, {{{0, 10}, Access::write}}));
}

}  // namespace
}  // namespace gyre::test
