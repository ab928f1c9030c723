// Pools and sequences: who holds which page, prefixes, and what is refused.
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

class KvPoolTest : public testing::Test {
 public:
  const KvGroupInfo& group(const Server& server, const std::string& name) {
    info = server.pool.describe();
    for (const KvGroupInfo& row : info.groups)
      if (row.name == name) return row;
    throw std::runtime_error("no group " + name);
  }

  Device device = Device::open("cpu", {.threads = 1});
  KvPoolInfo info;
};

TEST_F(KvPoolTest, GroupsAreLayersThatKeepTheSameKeys) {
  const Server server(device, mixed_pool());
  info = server.pool.describe();
  ASSERT_EQ(info.groups.size(), 4u);
  const char* const names[] = {"all keys", "tail 12", "sink tokens 4", "window 20"};
  const std::vector<uint64_t> layers[] = {{0, 2}, {0}, {0}, {1}};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(info.groups[i].name, names[i]);
    EXPECT_EQ(info.groups[i].layers, layers[i]);
    EXPECT_EQ(info.groups[i].free, info.groups[i].pages);
  }
  EXPECT_EQ(info.groups[0].pages, 32u);
  EXPECT_EQ(info.groups[2].pages, 16u);  // a page for each of 16 sequences
  const uint64_t f16_page = kv_page_bytes({KvFormat::f16, KvFormat::f16, 2, 32, 32, 8});
  EXPECT_EQ(info.groups[1].page_bytes, f16_page);
  EXPECT_EQ(info.groups[0].page_bytes,
            kv_page_bytes({KvFormat::tq8, KvFormat::tq4, 2, 32, 32, 8}) +
                kv_page_bytes({KvFormat::tq4, KvFormat::tq4, 2, 32, 32, 8}));
}

TEST_F(KvPoolTest, ASequenceHoldsWhatItNeeds) {
  Server server(device, mixed_pool());
  Talk talk = server.talk();
  server.fill(talk, some_tokens(30, 1));
  EXPECT_EQ(group(server, "all keys").used, 4u);
  EXPECT_EQ(group(server, "sink tokens 4").used, 1u);
  EXPECT_EQ(group(server, "window 20").used, 4u);  // its queries began at 0
  server.fill(talk, some_tokens(1, 2));            // the query at 30 sees 11 .. 30 and 19 .. 30
  EXPECT_EQ(group(server, "window 20").used, 3u);
  EXPECT_EQ(group(server, "tail 12").used, 2u);
  { const Talk gone = std::move(talk); }
  expect_no_page_used(server.pool);
  EXPECT_EQ(server.pool.describe().sequences, 0u);
}

TEST_F(KvPoolTest, ForksShareAndTheFirstWriteCopies) {
  Server server(device, mixed_pool());
  Talk a = server.talk();
  server.fill(a, some_tokens(20, 1));
  Talk b = a.fork();
  EXPECT_EQ(b.length(), 20u);
  EXPECT_EQ(group(server, "all keys").used, 3u);
  EXPECT_EQ(group(server, "all keys").shared, 3u);
  server.fill(b, some_tokens(1, 2));
  EXPECT_EQ(group(server, "all keys").used, 4u);
  EXPECT_EQ(group(server, "all keys").shared, 2u);
  EXPECT_EQ(group(server, "sink tokens 4").shared, 1u);  // full: nobody writes there any more
  EXPECT_EQ(group(server, "tail 12").shared, 1u);        // page 1; a alone holds page 0 still
  server.fill(a, some_tokens(1, 3));                     // alone in its page now
  EXPECT_EQ(group(server, "all keys").used, 4u);
}

TEST_F(KvPoolTest, ASharedPageThatIsFullIsNotCopied) {
  Server server(device, small_pool());
  Talk a = server.talk();
  server.fill(a, some_tokens(16, 1));
  Talk b = a.fork();
  server.fill(b, some_tokens(1, 2));
  EXPECT_EQ(group(server, "all keys").used, 3u);
  EXPECT_EQ(group(server, "all keys").shared, 2u);
}

TEST_F(KvPoolTest, TruncateGivesPagesBack) {
  Server server(device, small_pool());
  Talk a = server.talk();
  server.fill(a, some_tokens(20, 1));
  a.sequence.rollback(4);
  EXPECT_EQ(a.length(), 16u);
  EXPECT_EQ(group(server, "all keys").used, 2u);
  a.sequence.rollback(1);
  EXPECT_EQ(group(server, "all keys").used, 2u);
  EXPECT_REFUSED(("kv_sequence.rollback", "15 tokens", "cannot drop 16"), a.sequence.rollback(16));
  a.sequence.clear();
  EXPECT_EQ(a.length(), 0u);
  expect_no_page_used(server.pool);
}

TEST_F(KvPoolTest, TruncateIsRefusedWhereAWindowIsGone) {
  Server server(device, mixed_pool());
  Talk a = server.talk();
  server.fill(a, some_tokens(40, 1));
  server.fill(a, some_tokens(1, 2));  // keys before 21 have left the window: page 2 on is there
  a.sequence.rollback(1);             // the last step can always be taken back
  EXPECT_REFUSED(("kv_sequence.rollback", "window 20", "key 15", "query at 34"),
                 a.sequence.rollback(6));
  EXPECT_EQ(a.length(), 40u);
  a.sequence.rollback(5);
  a.sequence.clear();
  expect_no_page_used(server.pool);
}

TEST_F(KvPoolTest, MatchFindsWholePages) {
  Server server(device, small_pool());
  const std::vector<int32_t> tokens = some_tokens(30, 1);
  Talk a = server.talk();
  server.fill(a, tokens);
  EXPECT_EQ(server.pool.match(tokens).length(), 0u);  // nothing was published
  server.pool.publish(a.sequence, tokens);
  EXPECT_EQ(server.pool.describe().prefixes, 3u);
  EXPECT_EQ(server.pool.match(tokens).length(), 24u);
  EXPECT_EQ(server.pool.match(std::span(tokens).first(23)).length(), 16u);
  std::vector<int32_t> other = tokens;
  ++other[20];
  EXPECT_EQ(server.pool.match(other).length(), 16u);
  ++other[0];
  EXPECT_EQ(server.pool.match(other).length(), 0u);
  EXPECT_EQ(server.pool.match({}).length(), 0u);
}

TEST_F(KvPoolTest, WhatIsMatchedIsShared) {
  Server server(device, small_pool());
  const std::vector<int32_t> tokens = some_tokens(24, 1);
  {
    Talk a = server.talk();
    server.fill(a, tokens);
    server.pool.publish(a.sequence, tokens);
    EXPECT_EQ(group(server, "all keys").shared, 0u);  // the index is not a sequence
  }
  EXPECT_EQ(group(server, "all keys").used, 0u);
  EXPECT_EQ(group(server, "all keys").cached, 3u);
  Talk b = server.match(tokens);
  const Talk c = server.match(tokens);
  EXPECT_EQ(group(server, "all keys").shared, 3u);
  EXPECT_EQ(group(server, "all keys").cached, 0u);
  b.rollback(4);
  server.fill(b, some_tokens(2, 3));  // into a page that the index holds: copied
  EXPECT_EQ(group(server, "all keys").used, 4u);
  EXPECT_EQ(server.pool.match(tokens).length(), 24u);
  server.pool.forget();
  EXPECT_EQ(server.pool.match(tokens).length(), 0u);
  EXPECT_EQ(group(server, "all keys").used, 4u);
  EXPECT_EQ(group(server, "all keys").cached, 0u);
}

TEST_F(KvPoolTest, TheLeastRecentlyUsedPrefixIsEvicted) {
  Server server(device, small_pool(6));
  const std::vector<int32_t> one = some_tokens(16, 1), two = some_tokens(16, 2);
  for (const std::vector<int32_t>* const tokens : {&one, &two}) {
    Talk talk = server.talk();
    server.fill(talk, *tokens);
    server.pool.publish(talk.sequence, *tokens);
  }
  EXPECT_EQ(group(server, "all keys").cached, 4u);
  { const KvSequence used = server.pool.match(one); }
  Talk talk = server.talk();
  server.fill(talk, some_tokens(24, 3));  // two of three are free: the end of `two` goes
  EXPECT_EQ(server.pool.match(one).length(), 16u);
  EXPECT_EQ(server.pool.match(two).length(), 8u);
  EXPECT_EQ(server.pool.describe().evictions, 1u);
  const KvSequence held = server.pool.match(one);
  server.fill(talk, some_tokens(8, 4));
  EXPECT_EQ(server.pool.match(two).length(), 0u);
  EXPECT_ERROR(out_of_memory, ("kv_batch.begin_step", "1 pages are missing"),
               server.fill(talk, some_tokens(1, 5)));
  EXPECT_EQ(held.length(), 16u);
}

// A prefix is of use where windows and tails have all that the next query sees.
TEST_F(KvPoolTest, MatchesEndWhereWindowsAndTailsAreWhole) {
  Server server(device, mixed_pool());
  const std::vector<int32_t> tokens = some_tokens(64, 1);
  Talk a = server.talk();
  server.fill(a, std::span(tokens).first(40));
  server.pool.publish(a.sequence, std::span(tokens).first(40));
  server.fill(a, std::span(tokens).subspan(40, 24));
  EXPECT_EQ(server.pool.match(tokens).length(), 40u);  // not yet published again
  server.pool.publish(a.sequence, tokens);
  EXPECT_EQ(server.pool.match(tokens).length(), 64u);
  EXPECT_EQ(server.pool.match(std::span(tokens).first(63)).length(), 56u);

  Server late(device, mixed_pool());
  Talk b = late.talk();
  late.fill(b, std::span(tokens).first(40));
  late.fill(b, std::span(tokens).subspan(40, 24));
  late.pool.publish(b.sequence, tokens);  // pages before key 21 of the window are gone
  EXPECT_EQ(late.pool.match(tokens).length(), 64u);
  EXPECT_EQ(late.pool.match(std::span(tokens).first(48)).length(), 48u);  // sees 29 on: page 3
  EXPECT_EQ(late.pool.match(std::span(tokens).first(39)).length(), 0u);   // 32 would see 13 on
}

// Two prefixes whose first page differs behind the sink tokens have one page of them. It stays as
// long as one of the two does.
TEST_F(KvPoolTest, PrefixesThatPartBehindTheSinksShareTheirPage) {
  Server server(device, mixed_pool());
  std::vector<int32_t> tokens = some_tokens(24, 1);
  Talk a = server.talk();
  server.fill(a, std::span(tokens).first(6));
  Talk b = a.fork();
  server.fill(a, std::span(tokens).subspan(6));
  server.pool.publish(a.sequence, tokens);
  std::vector<int32_t> other = tokens;
  ++other[7];
  server.fill(b, std::span(other).subspan(6));
  server.pool.publish(b.sequence, other);
  EXPECT_EQ(group(server, "sink tokens 4").used, 1u);
  EXPECT_EQ(server.pool.match(tokens).length(), 24u);
  EXPECT_EQ(server.pool.match(other).length(), 24u);
  ++other[3];  // a sink token
  EXPECT_REFUSED(("kv_pool.publish", "tokens 0 to 7"), server.pool.publish(b.sequence, other));
  --other[3];
  a = server.talk(), b = server.talk();
  EXPECT_EQ(group(server, "sink tokens 4").cached, 1u);
  {
    Talk c = server.talk();
    server.fill(c, some_tokens(8 * 27, 5));  // of 32 pages 27: one of the two prefixes goes
    EXPECT_NE(server.pool.match(tokens).length(), server.pool.match(other).length());
  }
  EXPECT_EQ(group(server, "sink tokens 4").cached, 1u);
  server.pool.forget();
  const KvGroupInfo& sinks = group(server, "sink tokens 4");
  EXPECT_EQ(sinks.free, sinks.pages);
}

// Every query sees the sink tokens: without a page of them nothing behind it can be resumed, or is
// kept.
TEST_F(KvPoolTest, WithAPageOfSinksGoesItsPrefix) {
  KvPoolOptions options = small_pool();
  options.layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .sink_tokens = 12}};
  options.sequences = 1;  // two pages of sink tokens
  Server server(device, options);
  const std::vector<int32_t> one = some_tokens(32, 1), two = some_tokens(8, 2);
  for (const std::vector<int32_t>* const tokens : {&one, &two}) {
    Talk talk = server.talk();
    server.fill(talk, *tokens);  // of `two`: the second page of sink tokens is evicted
    server.pool.publish(talk.sequence, *tokens);
  }
  EXPECT_EQ(server.pool.match(one).length(), 8u);
  EXPECT_EQ(server.pool.match(two).length(), 8u);
  EXPECT_EQ(server.pool.describe().prefixes, 2u);
  EXPECT_EQ(server.pool.describe().evictions, 4u);
  EXPECT_EQ(group(server, "all keys").cached, 2u);
  EXPECT_EQ(group(server, "sink tokens 12").cached, 2u);
  expect_no_page_used(server.pool);
}

// A window has let go of them: the index would keep nodes that nothing can be resumed from and that
// no eviction takes.
TEST_F(KvPoolTest, PagesThatNoGroupHasAreNotPublished) {
  KvPoolOptions options = small_pool(6);
  options.layers = {{.k = KvFormat::f16, .v = KvFormat::f16, .window = 8}};
  Server server(device, options);
  const std::vector<int32_t> tokens = some_tokens(48, 1);
  {
    Talk talk = server.talk();
    for (uint64_t at = 0; at < 48; at += 8) server.fill(talk, std::span(tokens).subspan(at, 8));
    for (uint32_t i = 0; i < 100; ++i) server.pool.publish(talk.sequence, some_tokens(32, i));
    EXPECT_EQ(server.pool.describe().prefixes, 0u);
    server.pool.publish(talk.sequence, std::span(tokens).first(40));
    EXPECT_EQ(server.pool.describe().prefixes, 5u);  // the way to the page that is there
    server.pool.publish(talk.sequence, tokens);
    EXPECT_EQ(server.pool.describe().prefixes, 6u);
  }
  EXPECT_EQ(server.pool.match(tokens).length(), 48u);
  EXPECT_EQ(server.pool.match(std::span(tokens).first(40)).length(), 40u);
  Talk other = server.talk();
  server.fill(other, some_tokens(48, 2));  // takes every page
  EXPECT_EQ(server.pool.describe().prefixes, 0u);
  EXPECT_EQ(server.pool.describe().evictions, 2u);
}

TEST_F(KvPoolTest, PublishingOtherTokensForAPageIsRefused) {
  Server server(device, small_pool());
  std::vector<int32_t> tokens = some_tokens(16, 1);
  Talk a = server.talk();
  server.fill(a, tokens);
  server.pool.publish(a.sequence, tokens);
  tokens[9] += 1;
  EXPECT_REFUSED(("kv_pool.publish", "tokens 8 to 15"), server.pool.publish(a.sequence, tokens));
  EXPECT_EQ(server.pool.describe().prefixes, 2u);
  tokens.resize(17);
  EXPECT_REFUSED(("kv_pool.publish", "16 tokens, got 17"), server.pool.publish(a.sequence, tokens));
  const KvPool other(device, small_pool());
  EXPECT_REFUSED(("kv_pool.publish", "another pool"), other.publish(a.sequence, {}));
}

TEST_F(KvPoolTest, SequencesOutliveTheirPool) {
  Talk kept = [&] {
    Server server(device, small_pool());
    Talk made = server.talk();
    server.fill(made, some_tokens(9, 1));
    return made;
  }();
  EXPECT_EQ(kept.fork().length(), 9u);
  kept.sequence.clear();
}

KvPoolOptions tail_pool() {
  KvPoolOptions options = small_pool();
  options.layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 12}};
  return options;
}

// 32 tokens whose 16-bit tail begins at 20, inside a page: what was before was truncated.
Talk cut_tail(Server& server, Bits& bits) {
  const std::vector<int32_t> tokens = some_tokens(41, 5);
  Talk talk = server.talk();
  server.run(talk, std::span(tokens).first(40), true);
  server.run(talk, std::span(tokens).subspan(40));
  talk.rollback(21);
  bits = server.run(talk, std::span(tokens).subspan(20, 12));
  return talk;
}

// Nothing reads what other sequences left in the pages.
TEST(KvPoolTail, ATailThatWasCutBeginsAnew) {
  const Device device = Device::open("cpu", {.threads = 1});
  Server fresh(device, tail_pool()), used(device, tail_pool());
  {
    Talk gone = used.talk();
    used.run(gone, some_tokens(200, 6), true);
  }
  Bits expected, bits;
  const Talk one = cut_tail(fresh, expected), two = cut_tail(used, bits);
  EXPECT_EQ(bits, expected);
}

TEST(KvPoolTail, APageWithoutItsWholeTailIsNotPublished) {
  Server server(Device::open("cpu", {.threads = 1}), tail_pool());
  Bits bits;
  Talk talk = cut_tail(server, bits);
  server.pool.publish(talk.sequence, talk.tokens);
  EXPECT_EQ(server.match(talk.tokens).length(), 0u);  // a query at 32 sees keys from 21 in 16 bits
  server.run(talk, some_tokens(8, 7), true);
  server.pool.publish(talk.sequence, talk.tokens);
  EXPECT_EQ(server.match(talk.tokens).length(), 40u);
}

TEST_F(KvPoolTest, APoolThatWasMovedFromIsRefused) {
  KvPool from(device, small_pool());
  const KvSequence sequence = from.sequence();
  const KvPool to = std::move(from);
  const std::vector<std::string> why = {"kv_pool", "moved from"};
  EXPECT_TRUE(refused(why, [&] { from.options(); }));         // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(refused(why, [&] { from.describe(); }));        // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(refused(why, [&] { from.sequence(); }));        // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(refused(why, [&] { from.match({}); }));         // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(refused(why, [&] { from.forget(); }));          // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(refused(why, [&] { const KvBatch b(from); }));  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(refused({}, [&] { from.export_page(sequence, 0); }));
  EXPECT_TRUE(refused({}, [&] { from.save(sequence, "nowhere"); }));
  to.describe();
}

TEST_F(KvPoolTest, OptionsThatNoPoolCanHave) {
  const auto fails = [&](const std::vector<std::string>& parts, const auto& change) {
    KvPoolOptions options = small_pool();
    change(options);
    EXPECT_TRUE(refused(parts, [&] { const KvPool pool(device, options); }));
  };
  fails({"kv_pool", "layers, got 0"}, [](KvPoolOptions& o) { o.layers.clear(); });
  fails({"kv_heads"}, [](KvPoolOptions& o) { o.kv_heads = 0; });
  fails({"kv_pool: layer 0: head_dim", "multiple of 8", "17"},
        [](KvPoolOptions& o) { o.head_dim = 17; });
  fails({"page_tokens", "12"}, [](KvPoolOptions& o) { o.page_tokens = 12; });
  fails({"pages", "got 0"}, [](KvPoolOptions& o) { o.pages = 0; });
  fails({"pages of 8 tokens"}, [](KvPoolOptions& o) { o.pages = 1u << 30; });
  fails({"layer 1", "not compressed"}, [](KvPoolOptions& o) { o.layers[1].tail = 8; });
  fails({"layer 0", "sees all keys"}, [](KvPoolOptions& o) {
    o.layers[0].sink_tokens = 4;
    o.layers[0].window = 8;
  });
  fails({"below 2^31"}, [](KvPoolOptions& o) { o.layers[0].window = uint64_t{1} << 40; });
  fails({"sequences", "got 0"}, [](KvPoolOptions& o) { o.sequences = 0; });
  fails({"step_tokens", "got 0"}, [](KvPoolOptions& o) { o.step_tokens = 0; });
}

}  // namespace
}  // namespace gyre::test
