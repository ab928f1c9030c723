// Holders of pages, and the index of prefixes, without a device.
#include "serving/page_group.h"

#include "gyre_test.h"
#include "serving/prefix_index.h"

namespace gyre::test {
namespace {

TEST(PageGroup, PagesOfWindowsAndLimits) {
  const PageGroup all({}, 4, 8), window({.window = 20}, 4, 8),
      sink_tokens({.limit = 10, .f16 = true}, 4, 8);
  EXPECT_EQ(all.first_page(1000), 0u);
  EXPECT_EQ(all.end_page(17), 3u);
  EXPECT_EQ(all.end_page(16), 2u);
  EXPECT_EQ(window.first_page(0), 0u);
  EXPECT_EQ(window.first_page(26), 0u);  // the query at 26 sees 7 .. 26
  EXPECT_EQ(window.first_page(27), 1u);  // 8 .. 27
  EXPECT_EQ(window.end_page(27), 4u);
  EXPECT_EQ(sink_tokens.end_page(9), 2u);
  EXPECT_EQ(sink_tokens.end_page(100), 2u);
  EXPECT_TRUE(sink_tokens.writes(9));
  EXPECT_FALSE(sink_tokens.writes(10));
}

TEST(PageGroup, EveryPageIsHandedOutOnce) {
  PageGroup group({}, 5, 8);
  std::vector<bool> seen(5);
  for (int i = 0; i < 5; ++i) {
    const PageId page = group.take();
    ASSERT_TRUE(page >= 0 && page < 5);
    EXPECT_FALSE(seen[static_cast<size_t>(page)]);
    seen[static_cast<size_t>(page)] = true;
  }
  EXPECT_EQ(group.free(), 0u);
  group.retain(3);
  EXPECT_TRUE(group.shared(3));
  group.release(3);
  EXPECT_FALSE(group.shared(3));
  EXPECT_EQ(group.free(), 0u);
  group.release(3);
  EXPECT_EQ(group.free(), 1u);
  EXPECT_EQ(group.take(), 3);
}

TEST(PageGroup, CachedPagesGoInTheOrderOfTheirRelease) {
  PageGroup group({}, 4, 8);
  for (uint32_t i = 0; i < 4; ++i) group.cache(group.take(), 10 + i);
  EXPECT_EQ(group.cached(), 0u);  // sequences hold them
  EXPECT_EQ(group.holders(2), 1u);
  EXPECT_TRUE(group.shared(2));  // with the index: a write must copy
  for (const PageId page : {2, 0, 3, 1}) group.release(page);
  EXPECT_EQ(group.cached(), 4u);
  EXPECT_EQ(group.oldest_cached(), 2);
  EXPECT_EQ(group.node(2), 12u);
  group.retain(2);  // matched
  EXPECT_EQ(group.oldest_cached(), 0);
  EXPECT_EQ(group.cached(), 3u);
  group.release(2);  // now the newest
  group.retain(3);   // from the middle
  EXPECT_EQ(group.oldest_cached(), 0);
  group.release(3);
  for (const PageId page : {0, 1, 2, 3}) {
    EXPECT_EQ(group.oldest_cached(), page);
    group.uncache(page);
  }
  EXPECT_EQ(group.oldest_cached(), kNoPage);
  EXPECT_EQ(group.free(), 4u);
}

TEST(PageGroup, APageInUseLeavesTheIndexWithoutBecomingFree) {
  PageGroup group({}, 1, 8);
  const PageId page = group.take();
  group.cache(page, 7);
  group.uncache(page);
  EXPECT_EQ(group.node(page), kNoNode);
  EXPECT_EQ(group.free(), 0u);
  EXPECT_FALSE(group.shared(page));
  group.release(page);
  EXPECT_EQ(group.free(), 1u);
}

uint64_t same_hash(uint64_t /*parent*/, std::span<const int32_t> /*tokens*/) { return 42; }

class PrefixIndexTest : public testing::TestWithParam<PrefixHash> {};

TEST_P(PrefixIndexTest, FindsByParentAndTokensWhateverTheHash) {
  PrefixIndex index(2, 1, 5, GetParam());
  const std::vector<int32_t> ab = {1, 2}, cd = {3, 4}, ac = {1, 3};
  EXPECT_EQ(index.find(kNoNode, ab), kNoNode);
  const uint32_t a = index.insert(kNoNode, ab), b = index.insert(a, cd),
                 c = index.insert(kNoNode, cd);
  const uint32_t d = index.insert(a, ac), e = index.insert(c, cd);
  EXPECT_EQ(index.find(kNoNode, ab), a);
  EXPECT_EQ(index.find(a, cd), b);
  EXPECT_EQ(index.find(kNoNode, cd), c);
  EXPECT_EQ(index.find(a, ac), d);
  EXPECT_EQ(index.find(c, cd), e);
  EXPECT_EQ(index.find(c, ab), kNoNode);
  EXPECT_EQ(index.find(b, cd), kNoNode);
  EXPECT_EQ(index.size(), 5u);
  EXPECT_FALSE(index.is_leaf(a));
  index.erase(b);
  EXPECT_EQ(index.find(a, cd), kNoNode);
  EXPECT_EQ(index.find(a, ac), d);
  index.erase(d);
  EXPECT_TRUE(index.is_leaf(a));
  index.erase(a);
  EXPECT_EQ(index.find(kNoNode, cd), c);
  EXPECT_EQ(index.find(c, cd), e);
  const uint32_t again = index.insert(kNoNode, ab);  // a node that was used before
  EXPECT_TRUE(index.is_leaf(again));
  EXPECT_TRUE(index.is_empty(again));
  EXPECT_EQ(index.find(kNoNode, ab), again);
}

TEST_P(PrefixIndexTest, ParentsComeBeforeChildren) {
  PrefixIndex index(1, 1, 5, GetParam());
  std::vector<uint32_t> nodes = {index.insert(kNoNode, std::vector<int32_t>{0})};
  for (int32_t i = 1; i < 40; ++i)
    nodes.push_back(index.insert(nodes[static_cast<size_t>(i / 3)], std::vector<int32_t>{i}));
  std::vector<uint32_t> seen;
  index.for_each([&](uint32_t node) {
    const uint32_t parent = index.parent(node);
    EXPECT_TRUE(parent == kNoNode || std::ranges::count(seen, parent) == 1);
    seen.push_back(node);
  });
  EXPECT_EQ(seen.size(), nodes.size());
}

INSTANTIATE_TEST_SUITE_P(Hashes, PrefixIndexTest, testing::Values(prefix_hash, same_hash));

TEST(PrefixHash, DependsOnParentAndEveryToken) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  EXPECT_EQ(prefix_hash(1, tokens), prefix_hash(1, tokens));
  EXPECT_NE(prefix_hash(1, tokens), prefix_hash(2, tokens));
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<int32_t> other = tokens;
    ++other[i];
    EXPECT_NE(prefix_hash(1, tokens), prefix_hash(1, other));
  }
}

}  // namespace
}  // namespace gyre::test
