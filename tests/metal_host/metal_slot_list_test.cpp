// Which simdgroup writes which tile of a list of slots. Two that wrote one tile would race on a
// GPU, which the emulation, where one follows the other, does not show.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>
// After the library's headers: it brings Metal's words.
#include "metal/kernels/write_job.h"

namespace gyre::test {
namespace {

constexpr int64_t kSlots = 64;

// Lists in any order, with slots that are none.
TEST(MetalSlotList, EveryTileHasOneWriter) {
  std::mt19937 random(28);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> slots(random() % 60 + 1);
    for (int64_t& slot : slots) slot = static_cast<int64_t>(random() % (kSlots + 20)) - 10;
    const void* const from = slots.data();
    const metal::SlotList list = {
        {static_cast<const unsigned char*>(from), 8}, slots.size(), kSlots};
    std::set<int64_t> written;
    for (uint64_t t = 0; t < slots.size(); ++t) {
      const bool exists = slots[t] >= 0 && slots[t] < kSlots;
      ASSERT_EQ(list.leads(t), exists && written.count(slots[t] / 8) == 0) << t;
      if (!exists || !written.insert(slots[t] / 8).second) continue;
      for (unsigned int nth = 0; nth < 8; ++nth) {
        uint64_t last = slots.size();
        for (uint64_t i = 0; i < slots.size(); ++i)
          if (slots[i] == slots[t] / 8 * 8 + nth) last = i;
        ASSERT_EQ(metal::last_token(list, t, nth), last);
      }
    }
  }
}

}  // namespace
}  // namespace gyre::test
