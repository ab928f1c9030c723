// Pages as bytes and files of a pool: what comes back is what was there; what is damaged does not.
#include <functional>

#include "cache/snapshot_fixture.h"
#include "files/container.h"
#include "runtime/internals.h"
#include "serving/pool_file.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

class PoolFiles : public testing::TestWithParam<KvPoolOptions> {
 public:
  Server server() const {
    return Server(device, GetParam(), {.max_sequences = 4, .max_tokens = 64});
  }
  // What the next token's queries see.
  Bits next(Server& with, Talk& talk) const { return with.run(talk, std::span(&token, 1)); }

  Device device = Device::open("cpu", {.threads = 1});
  Folder folder;
  int32_t token = 77;
};

TEST_P(PoolFiles, ASequenceGoesOnAfterLoad) {
  for (const uint64_t length : {0u, 1u, 8u, 29u, 48u}) {
    Server from = server(), to = server();
    Talk talk = from.talk();
    from.prompt(talk, some_tokens(length, 3), 20);
    from.pool.save(talk.sequence, folder / "sequence");
    Talk loaded{to.pool.load(folder / "sequence"), talk.tokens};
    EXPECT_EQ(loaded.length(), length);
    to.pool.save(loaded.sequence, folder / "again");
    EXPECT_EQ(bytes_of_file(folder / "again"), bytes_of_file(folder / "sequence"));
    EXPECT_EQ(next(to, loaded), next(from, talk)) << length;
  }
}

TEST_P(PoolFiles, ATailThatWasCutComesBackAsItWas) {
  Server from = server(), to = server();
  Talk talk = from.talk();
  from.prompt(talk, some_tokens(16, 3), 16);
  from.prompt(talk, some_tokens(12, 4), 12);
  talk.rollback(9);
  from.pool.save(talk.sequence, folder / "sequence");
  Talk loaded{to.pool.load(folder / "sequence"), talk.tokens};
  EXPECT_EQ(next(to, loaded), next(from, talk));
}

TEST_P(PoolFiles, PagesTravelOneByOne) {
  Server from = server(), to = server();
  Talk talk = from.talk();
  from.prompt(talk, some_tokens(29, 3), 20);
  Talk made{to.pool.sequence(), talk.tokens};
  std::vector<std::vector<std::byte>> pages;
  for (uint64_t page = 0; page * GetParam().page_tokens < talk.length(); ++page)
    pages.push_back(from.pool.export_page(talk.sequence, page));
  EXPECT_REFUSED(("kv_pool.import_page", "page 1 comes after"),
                 to.pool.import_page(made.sequence, pages[1]));
  for (const auto& page : pages) to.pool.import_page(made.sequence, page);
  EXPECT_EQ(made.length(), talk.length());
  EXPECT_REFUSED(("kv_pool.import_page", "comes after"),
                 to.pool.import_page(made.sequence, pages[0]));
  EXPECT_EQ(next(to, made), next(from, talk));
  EXPECT_REFUSED(("kv_pool.export_page", "got page 9"),
                 (void)from.pool.export_page(talk.sequence, 9));
  EXPECT_REFUSED(("kv_pool.export_page", "another pool"),
                 (void)to.pool.export_page(talk.sequence, 0));
  EXPECT_REFUSED(("kv_pool.import_page", "another pool"),
                 to.pool.import_page(talk.sequence, pages[0]));
}

TEST_P(PoolFiles, PrefixesAreKnownAfterLoad) {
  Server from = server(), to = server();
  const std::vector<int32_t> prompt = some_tokens(40, 3), other = some_tokens(40, 4);
  Talk talk = from.talk(), second = from.talk();
  for (uint64_t at = 0; at < 40; at += 8) {
    from.prompt(talk, std::span(prompt).subspan(at, 8), 8);
    from.pool.publish(talk.sequence, talk.tokens);
  }
  from.prompt(second, std::span(prompt).first(16), 16);
  from.prompt(second, std::span(other).first(16), 16);
  from.pool.publish(second.sequence, second.tokens);
  from.pool.save_prefixes(folder / "prefixes");
  const uint64_t known = from.pool.describe().prefixes;
  EXPECT_EQ(to.pool.load_prefixes(folder / "prefixes"), known);
  EXPECT_EQ(to.pool.load_prefixes(folder / "prefixes"), 0u);  // nothing new
  EXPECT_EQ(to.pool.describe().prefixes, known);
  expect_no_page_used(to.pool);
  Talk matched = to.match(prompt);
  EXPECT_EQ(matched.length(), 40u);
  EXPECT_EQ(next(to, matched), next(from, talk));
  to.pool.forget();
  matched.sequence.clear();
  for (const KvGroupInfo& group : to.pool.describe().groups) EXPECT_EQ(group.free, group.pages);
}

INSTANTIATE_TEST_SUITE_P(Pools, PoolFiles,
                         testing::Values(small_pool(), mixed_pool(), layered_pool()));

// The first rows of a file of a sequence, with a header that is right.
void cut_file(const KvPool& pool, const std::string& path, uint64_t rows) {
  const FileSource source("test", path);
  const PoolFile whole = read_pool_file(source, Internals::state(pool), PoolFileKind::sequence);
  PoolFile made{whole.kind, {}};
  Bytes blocks;
  for (uint64_t row = 0; row < rows; ++row) {
    const Bytes record = read_record(source, Internals::state(pool), whole, row);
    made.rows.push_back({pool_file_header_bytes(rows) + blocks.size(), record.size(),
                         whole.rows[row].parent, whole.rows[row].tokens_checksum});
    blocks.insert(blocks.end(), record.begin(), record.end());
  }
  Bytes bytes =
      pool_file_header(Internals::state(pool), made, pool_file_header_bytes(rows) + blocks.size());
  bytes.insert(bytes.end(), blocks.begin(), blocks.end());
  put_file(path, bytes);
}

// More rows than the pool has pages: found by their number, before any page is read.
TEST(PoolLoad, MoreRowsThanPagesAreRefused) {
  const Folder folder;
  const Device device = Device::open("cpu", {.threads = 1});
  const KvPool pool(device, small_pool());
  const uint64_t pages = pool.describe().groups[0].pages;
  for (const bool sequence : {true, false}) {
    PoolFile made{sequence ? PoolFileKind::sequence : PoolFileKind::prefixes, {}};
    const uint64_t count = pages + 7;
    const uint64_t tokens = pool_file_tokens_bytes(Internals::state(pool), made.kind);
    for (uint64_t row = 0; row < count; ++row)
      made.rows.push_back({pool_file_header_bytes(count) + row * tokens, 0, row - 1, 0});
    Bytes bytes = pool_file_header(Internals::state(pool), made, made.rows.back().offset + tokens);
    bytes.resize(made.rows.back().offset + tokens);
    put_file(folder / "many", bytes);
    EXPECT_REFUSED(
        ("can never fit", "39 pages", "the pool has 32"),
        sequence ? (void)pool.load(folder / "many") : (void)pool.load_prefixes(folder / "many"));
  }
}

// A file whose windows lack what the next query sees, in a pool that must evict to take it.
TEST(PoolLoad, WhatIsRefusedEvictsNothing) {
  const Folder folder;
  const Device device = Device::open("cpu", {.threads = 1});
  Server server(device, mixed_pool(12), {.max_sequences = 2, .max_tokens = 64});
  const std::vector<int32_t> tokens = some_tokens(48, 2);
  {
    Talk talk = server.talk();
    for (const uint64_t count : {40u, 24u, 1u}) server.fill(talk, some_tokens(count, 1));
    server.pool.save(talk.sequence, folder / "whole");
    server.pool.save(talk.sequence, folder / "cut");
    Talk other = server.talk();
    talk.sequence.clear();
    server.fill(other, tokens);
    server.pool.publish(other.sequence, tokens);
  }
  cut_file(server.pool, folder / "cut", 5);
  std::vector<Talk> held;  // four pages are left
  held.push_back(server.talk());
  server.fill(held[0], some_tokens(16, 3));
  EXPECT_REFUSED(("kv_pool.load", "window 20", "no longer have key 21"),
                 (void)server.pool.load(folder / "cut"));
  EXPECT_EQ(server.pool.describe().evictions, 0u);
  server.fill(held[0], some_tokens(16, 4));
  EXPECT_ERROR(out_of_memory, ("kv_pool.load", "1 pages are missing"),
               (void)server.pool.load(folder / "whole"));
  EXPECT_EQ(server.pool.describe().evictions, 0u);
  held[0].rollback(16);
  const KvSequence loaded = server.pool.load(folder / "whole");
  EXPECT_EQ(loaded.length(), 65u);
  EXPECT_GE(server.pool.describe().evictions, 1u);
}

// Prefixes that lost a page of their sink tokens in use: what is saved of the others can be loaded.
TEST(PoolLoad, PrefixesAfterAPageOfSinksWasEvicted) {
  const Folder folder;
  const Device device = Device::open("cpu", {.threads = 1});
  KvPoolOptions options = mixed_pool();
  options.sequences = 2;
  Server from(device, options), to(device, options);
  std::vector<std::vector<int32_t>> prompts;
  for (uint32_t i = 0; i < 3; ++i) {
    Talk talk = from.talk();
    prompts.push_back(some_tokens(16, i));
    from.fill(talk, prompts[i]);
    from.pool.publish(talk.sequence, prompts[i]);
  }
  EXPECT_GE(from.pool.describe().evictions, 1u);
  from.pool.save_prefixes(folder / "prefixes");
  EXPECT_EQ(to.pool.load_prefixes(folder / "prefixes"), 4u);
  for (const uint64_t i : {0u, 1u, 2u}) {
    EXPECT_EQ(from.pool.match(prompts[i]).length(), i == 0 ? 0 : 16u);
    EXPECT_EQ(to.pool.match(prompts[i]).length(), i == 0 ? 0 : 16u);
  }
}

// Parallel answers to a prompt that is shorter than a page share its page of sink tokens, and they
// still do when they come back from a file.
TEST(PoolLoad, PrefixesShareSinkTokensAsBefore) {
  const Folder folder;
  const Device device = Device::open("cpu", {.threads = 1});
  KvPoolOptions options = small_pool(16);
  options.layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .sink_tokens = 1}};
  options.sequences = 2;  // as many pages of sink tokens
  Server from(device, options), to(device, options);
  Talk prompt = from.talk();
  from.fill(prompt, some_tokens(4, 1));
  std::vector<Talk> talks;
  for (uint32_t i = 0; i < 3; ++i) {
    talks.push_back(prompt.fork());
    from.fill(talks[i], some_tokens(4, 2 + i));
    from.pool.publish(talks[i].sequence, talks[i].tokens);
  }
  Talk other = from.talk();  // other sink tokens: a page of its own
  const std::vector<int32_t> others = some_tokens(8, 9);
  from.fill(other, others);
  from.pool.publish(other.sequence, others);
  const auto cached = [](const KvPool& pool) {
    std::vector<uint64_t> pages;
    for (const KvGroupInfo& group : pool.describe().groups) pages.push_back(group.cached);
    return pages;
  };
  from.pool.save_prefixes(folder / "prefixes");
  EXPECT_EQ(to.pool.load_prefixes(folder / "prefixes"), 4u);
  EXPECT_EQ(cached(to.pool), (std::vector<uint64_t>{4, 2}));
  for (Talk& talk : talks) {
    Talk again{to.pool.match(talk.tokens), talk.tokens};
    ASSERT_EQ(again.length(), 8u);
    EXPECT_EQ(to.run(again, some_tokens(1, 5)), from.run(talk, some_tokens(1, 5)));
  }
  // One of them is known already: the others share what it has.
  Server part(device, options);
  Talk first = part.talk();
  part.fill(first, some_tokens(4, 1));
  part.fill(first, some_tokens(4, 2));
  part.pool.publish(first.sequence, first.tokens);
  first = part.talk();
  EXPECT_EQ(part.pool.load_prefixes(folder / "prefixes"), 3u);
  EXPECT_EQ(cached(part.pool), (std::vector<uint64_t>{4, 2}));
  part.pool.forget();
  EXPECT_EQ(cached(part.pool), (std::vector<uint64_t>{0, 0}));
  EXPECT_EQ(part.pool.load_prefixes(folder / "prefixes"), 4u);
}

// Small enough to damage everywhere.
class PoolDamage : public testing::Test {
 public:
  static KvPoolOptions options() {
    return {.kv_heads = 1,
            .head_dim = 16,
            .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq2, .tail = 8}},
            .pages = 8,
            .page_tokens = 8,
            .sequences = 8,
            .step_tokens = 8};
  }
  PoolDamage() {
    Talk talk = server.talk();
    server.prompt(talk, some_tokens(20, 1), 20);
    server.pool.publish(talk.sequence, talk.tokens);
    server.pool.save(talk.sequence, folder / "sequence");
    server.pool.save_prefixes(folder / "prefixes");
    page = server.pool.export_page(talk.sequence, 2);
  }
  std::vector<uint64_t> counts() const {
    std::vector<uint64_t> made = {server.pool.describe().prefixes};
    for (const KvGroupInfo& group : server.pool.describe().groups)
      made.insert(made.end(), {group.used, group.cached, group.free});
    return made;
  }
  // Every byte flipped, every length: refused as damaged, and the pool stays as it was.
  void damage(const Bytes& good, const std::function<void(std::span<const std::byte>)>& load) {
    const std::vector<uint64_t> before = counts();
    const auto fails = [&](const Bytes& bad) {
      return throws_error(ErrorCode::io, {"kv_pool."}, [&] { load(bad); });
    };
    for (size_t i = 0; i < good.size(); ++i) {
      for (const int flip : {0x01, 0x80}) {
        Bytes bad = good;
        bad[i] ^= static_cast<std::byte>(flip);
        ASSERT_TRUE(fails(bad)) << "byte " << i << " ^ " << flip;
      }
      ASSERT_TRUE(fails(Bytes(good.begin(), good.begin() + static_cast<ptrdiff_t>(i)))) << i;
    }
    Bytes longer = good;
    longer.resize(good.size() + 8);
    ASSERT_TRUE(fails(longer));
    EXPECT_EQ(counts(), before);
  }

  Device device = Device::open("cpu", {.threads = 1});
  Server server{device, options(), {.max_sequences = 2, .max_tokens = 20}};
  Folder folder;
  Bytes page;
};

TEST_F(PoolDamage, OfAPage) {
  KvSequence sequence = server.pool.sequence();
  damage(page, [&](std::span<const std::byte> bytes) { server.pool.import_page(sequence, bytes); });
}

TEST_F(PoolDamage, OfASequence) {
  damage(bytes_of_file(folder / "sequence"), [&](std::span<const std::byte> bytes) {
    put_file(folder / "bad", bytes);
    (void)server.pool.load(folder / "bad");
  });
}

TEST_F(PoolDamage, OfPrefixes) {
  const Bytes good = bytes_of_file(folder / "prefixes");
  server.pool.forget();
  damage(good, [&](std::span<const std::byte> bytes) {
    put_file(folder / "bad", bytes);
    (void)server.pool.load_prefixes(folder / "bad");
  });
  EXPECT_EQ(server.pool.load_prefixes(folder / "prefixes"), 2u);
}

// Headers that are signed again: checked for what they say. Any number anywhere is refused, or what
// was loaded can be used.
TEST_F(PoolDamage, NumbersThatLie) {
  const Bytes good = bytes_of_file(folder / "sequence");
  constexpr size_t kRows = 40, kRowBytes = 32, kPages = 3;
  const size_t header = kRows + kPages * kRowBytes + 8;
  size_t refusals = 0;
  for (size_t at = 0; at + 8 <= header - 8; at += 4) {
    const uint64_t is = number_at(good, at, 8);
    for (const uint64_t value : {uint64_t{0}, is + 1, is - 1, is << 1, uint64_t{1} << 40, ~is}) {
      Bytes bad = good;
      put_number(bad, at, 8, value);
      if (bad == good) continue;
      put_number(bad, header - 8, 8, checksum_of(std::span(bad).first(header - 8)));
      put_file(folder / "bad", bad);
      EXPECT_ERROR(io, ("kv_pool.load"), (void)server.pool.load(folder / "bad"))
          << at << " = " << value;
      ++refusals;
    }
  }
  EXPECT_GE(refusals, 150u);
}

TEST_F(PoolDamage, APageThatLies) {
  constexpr size_t kHead = 48, kGroups = 2;
  size_t passed = 0, refusals = 0;
  for (size_t at = 0; at + 8 <= kHead + 16 * kGroups; at += 4) {
    const uint64_t is = number_at(page, at, 8);
    for (const uint64_t value : {uint64_t{0}, is + 1, is - 1, is << 1, uint64_t{1} << 40, ~is}) {
      Bytes bad = page;
      put_number(bad, at, 8, value);
      if (bad == page) continue;
      put_number(bad, bad.size() - 8, 8, checksum_of(std::span(bad).first(bad.size() - 8)));
      Talk talk = server.talk();
      server.prompt(talk, some_tokens(16, 5), 16);
      try {
        server.pool.import_page(talk.sequence, bad);
      } catch (const Error&) {
        EXPECT_EQ(talk.length(), 16u);
        ++refusals;
        continue;
      }
      talk.tokens.resize(talk.length());
      for (const uint32_t bits : server.run(talk, some_tokens(3, 6)))
        EXPECT_TRUE(std::isfinite(std::bit_cast<float>(bits)));
      ++passed;
    }
  }
  EXPECT_GE(passed, 2u);  // fewer tokens, another begin of the tail
  EXPECT_GE(refusals, 80u);
  server.pool.forget();
  expect_no_page_used(server.pool);
}

TEST_F(PoolDamage, AFullPoolLoadsNothing) {
  Talk big = server.talk();
  server.prompt(big, some_tokens(20, 7), 20);
  server.prompt(big, some_tokens(20, 8), 20);
  const KvSequence one = server.pool.load(folder / "sequence");  // the last three pages
  const std::vector<uint64_t> before = counts();
  EXPECT_ERROR(out_of_memory,
               ("kv_pool.load", "3 pages are missing", "group \"all keys\"", "0 of 8 are free"),
               (void)server.pool.load(folder / "sequence"));
  EXPECT_EQ(counts(), before);
  KvPoolOptions other = options();
  other.layers[0].v = KvFormat::tq3;
  const KvPool pool(device, other);
  EXPECT_ERROR(io, ("kv_pool.load", "other layers"), (void)pool.load(folder / "sequence"));
  EXPECT_ERROR(io, ("kv_pool.load_prefixes", "holds no prefixes"),
               (void)server.pool.load_prefixes(folder / "sequence"));
  big.sequence.clear();
  KvSequence sequence = server.pool.sequence();
  server.batch.begin_step(server.encoder, {{sequence, 1}});
  EXPECT_REFUSED(("kv_pool.save", "lacks append() of layer 0"),
                 server.pool.save(sequence, folder / "open"));
}

}  // namespace
}  // namespace gyre::test
