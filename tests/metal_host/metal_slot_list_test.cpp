// Which simdgroup writes which tile of a list of slots. Two that wrote one tile would race on a
// GPU, which the emulation, where one follows the other, does not show.
#include <gtest/gtest.h>

#include <random>
#include <vector>
// After the library's headers: it brings Metal's words.
#include "metal/kernels/slot_list.h"

namespace gyre::test {
namespace {

constexpr uint64_t kSlots = 64;

class Slots {
 public:
  explicit Slots(std::vector<int64_t> slots) : slots_(std::move(slots)) {}

  metal::SlotList list() const {
    const void* const from = slots_.data();
    return {static_cast<const unsigned char*>(from), 8, slots_.size(), kSlots};
  }
  std::vector<uint64_t> leaders() const {
    std::vector<uint64_t> found;
    for (uint64_t t = 0; t < slots_.size(); ++t)
      if (list().leads(t)) found.push_back(t);
    return found;
  }

 private:
  std::vector<int64_t> slots_;
};

std::vector<int64_t> with_gap(uint64_t skipped) {
  std::vector<int64_t> slots(skipped + 2, -1);
  slots.front() = 41, slots.back() = 42;
  return slots;
}

TEST(MetalSlotList, ARunHasOneLeaderWhateverIsSkippedInIt) {
  for (uint64_t skipped = 0; skipped <= 64; ++skipped) {
    const Slots slots(with_gap(skipped));
    EXPECT_EQ(slots.leaders(), std::vector<uint64_t>{0}) << skipped;
    EXPECT_EQ(slots.list().find(0, 2), skipped + 1);
    EXPECT_EQ(slots.list().find(0, 3), skipped + 2) << "none";
  }
}

// The list says that it is not so; each writes its own part of the tile.
TEST(MetalSlotList, MoreSkippedTokensThanAllowedBeginAnotherRun) {
  const Slots slots(with_gap(65));
  EXPECT_EQ(slots.leaders(), (std::vector<uint64_t>{0, 66}));
  EXPECT_EQ(slots.list().find(0, 2), 67u);
  EXPECT_EQ(slots.list().find(66, 2), 66u);
}

// Every token of the pages is written by the one leader of its run, or by a later token of its
// slot.
TEST(MetalSlotList, EveryTokenHasOneWriter) {
  std::mt19937 random(28);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> slots;
    std::vector<uint64_t> leaders;
    int64_t before = -1;  // tile
    for (uint64_t run = 0; run < 12; ++run) {
      int64_t tile = random() % 8;
      if (tile == before) tile = (tile + 1) % 8;
      before = tile;
      for (uint64_t i = random() % 5 + 1, first = 1; i != 0; --i, first = 0) {
        for (uint64_t skipped = random() % 4; skipped != 0; --skipped)
          slots.push_back(random() % 2 == 0 ? -1 : int64_t{1} << 40);
        if (first != 0) leaders.push_back(slots.size());
        slots.push_back(8 * tile + static_cast<int64_t>(random() % 8));
      }
    }
    const Slots list(slots);
    ASSERT_EQ(list.leaders(), leaders);
    for (size_t i = 0; i < leaders.size(); ++i) {
      const uint64_t end = i + 1 < leaders.size() ? leaders[i + 1] : slots.size();
      for (unsigned int nth = 0; nth < 8; ++nth) {
        uint64_t last = slots.size();
        for (uint64_t t = leaders[i]; t < end; ++t)
          if (slots[t] >= 0 && slots[t] < int64_t{kSlots} && slots[t] % 8 == nth) last = t;
        ASSERT_EQ(list.list().find(leaders[i], nth), last);
      }
    }
  }
}

}  // namespace
}  // namespace gyre::test
