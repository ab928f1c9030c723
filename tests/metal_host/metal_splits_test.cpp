// Decoding over pages in splits: what a row comes to depends on its sequence alone, not on how many
// splits the call has room for, nor on who shares its group.
#include <gtest/gtest.h>

#include "pages/paged_fixture.h"

namespace gyre::test {
namespace {

// Each alone: 300 and 512 keys are then written at once, in the batch merged from one of three.
TEST(MetalSplits, RowsDoNotDependOnTheBatch) {
  const std::vector<uint64_t> lengths = {1, 300, 512, 513, 1100, 40};
  const std::vector<Part> parts = {{0, 1, 1},   {1, 300, 2},  {2, 512, 1},
                                   {3, 513, 3}, {4, 1100, 1}, {5, 40, 30, true}};
  for (const Formats& f : kFormats) {
    const PagedWorld world(Device::open("metal"), shape_of(f.k, f.v, 16), 4, lengths);
    const RowBits together = world.attend(parts);
    uint64_t rows = 0;
    for (const Part& part : parts) rows += compare(together, world.attend({part}));
    EXPECT_EQ(rows, together.size()) << text(f);
  }
}

// A window begins elsewhere for each token, and so does the walk of a group that has several.
TEST(MetalSplits, RowsDoNotDependOnTheirNeighbours) {
  for (const uint64_t window : {uint64_t{0}, uint64_t{33}, uint64_t{1056}}) {
    PagedWorld world(Device::open("metal"), shape_of(KvFormat::tq8, KvFormat::tq4, 16), 4, {1120});
    world.options.mask.window = window;
    const RowBits three = world.attend({{0, 1089, 3}});
    uint64_t rows = 0;
    for (uint64_t length = 1087; length <= 1089; ++length)
      rows += compare(three, world.attend({{0, length, 1}}));
    EXPECT_EQ(rows, 3u) << "window " << window;
  }
}

}  // namespace
}  // namespace gyre::test
