// Sequences that share pages step together, in pools of exactly the pages that they need. Which
// pages that are says a plain model: a page that a step writes has one holder afterwards, a page
// that a window has left is gone, all other pages stay shared.
#include "gyre_test.h"
#include "runtime/internals.h"
#include "serving/pool_state.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

KvPoolState& state_of(const KvPool& pool) { return Internals::state(pool); }

// A pool whose groups have these numbers of pages, whatever its options would give them.
Server exact_server(const Device& device, const KvPoolOptions& options,
                    const std::vector<uint64_t>& pages) {
  Server server(device, options, {.max_sequences = 8, .max_tokens = 128});
  std::vector<PageGroup>& groups = state_of(server.pool).groups;
  for (size_t i = 0; i < groups.size(); ++i)
    groups[i] = PageGroup(groups[i].keys(), pages[i], options.page_tokens);
  return server;
}

// All sequences take one token of their own in one step; their outputs.
std::vector<Bits> step_together(Server& server, std::span<Talk> talks, uint32_t seed) {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<TalkStep> steps;
  tokens.reserve(talks.size());
  for (Talk& talk : talks) {
    tokens.push_back(some_tokens(1, seed++));
    steps.push_back({talk, tokens.back()});
  }
  return server.run(steps);
}

// A sequence of `tokens` tokens and forks of it.
struct Forks {
  Forks(const Device& device, const KvPoolOptions& options, size_t tokens, size_t forks = 1)
      : server(device, options) {
    talks.push_back(server.talk());
    server.fill(talks[0], some_tokens(tokens, 1));
    for (size_t i = 0; i < forks; ++i) talks.push_back(talks[0].fork());
  }
  KvGroupInfo group() const { return server.pool.describe().groups[0]; }
  // All step together, and each has the bits that it has alone.
  void expect_as_alone() {
    const std::vector<Bits> bits = step_together(server, talks, 10);
    KvPoolOptions ample = server.pool.options();
    ample.pages = 64;
    for (size_t i = 0; i < talks.size(); ++i) {
      const std::span<const int32_t> tokens = talks[i].tokens;
      Server alone(server.encoder.device(), ample);
      Talk same = alone.talk();
      alone.fill(same, tokens.first(tokens.size() - 1));
      EXPECT_EQ(alone.run(same, tokens.last(1)), bits[i]) << "sequence " << i;
    }
  }

  Server server;
  std::vector<Talk> talks;
};

class ForkSteps : public testing::Test {
 public:
  Device device = Device::open("cpu", {.threads = 1});
};

// Three tokens and their fork: 4 sink tokens want a page each, and there are 2.
TEST_F(ForkSteps, ASequenceAndItsForkFitAPoolForTwo) {
  KvPoolOptions options = small_pool();
  options.layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .sink_tokens = 4}};
  options.sequences = 2;
  Forks(device, options, 3).expect_as_alone();
}

TEST_F(ForkSteps, OneOfTheForksKeepsThePage) {
  Forks forks(device, small_pool(2 + 4), 20, 3);  // two full pages and 4 tokens
  forks.expect_as_alone();
  EXPECT_EQ(forks.group().free, 0u);
}

// Somebody who does not write keeps the page as it is: all who write copy it.
TEST_F(ForkSteps, APageThatAnotherKeepsIsCopiedByAllWriters) {
  Forks forks(device, small_pool(3), 4);
  const Talk still = forks.talks[0].fork();
  step_together(forks.server, forks.talks, 10);
  EXPECT_EQ(forks.group().used, 3u);
  EXPECT_EQ(forks.group().shared, 0u);
}

// The shorter fork must not write where the longer one has tokens: the step may be taken back.
TEST_F(ForkSteps, AStepThatIsTakenBackLeavesEveryForkItsTokens) {
  Forks forks(device, small_pool(2), 6);
  auto& [server, talks] = forks;
  talks[0].rollback(3);
  const std::vector<int32_t> tokens = some_tokens(2, 5);
  const std::vector<TalkStep> steps = {{talks[0], tokens}, {talks[1], tokens}};
  server.begin_step(steps);
  server.append(steps, 0);  // layer 1 is missing
  server.encoder.submit().wait();
  server.batch.rollback();
  EXPECT_EQ(forks.group().used, 1u);
  forks.expect_as_alone();
}

TEST_F(ForkSteps, SinkTokensThatAStepDoesNotWriteAreNotCopied) {
  KvPoolOptions options = mixed_pool();
  options.sequences = 1;  // one page of sink tokens
  options.step_tokens = 256;
  Forks(device, options, 6).expect_as_alone();
}

TEST_F(ForkSteps, AFrontPageThatAllGiveUpIsRoom) {
  KvPoolOptions options = small_pool(3);
  options.layers = {{.k = KvFormat::f16, .v = KvFormat::f16, .window = 8}};
  Forks forks(device, options, 16);
  forks.expect_as_alone();  // the query at 16 sees keys from 9 on: page 0 is given up
  EXPECT_EQ(forks.group().free, 0u);
  EXPECT_EQ(forks.group().shared, 1u);
}

// One user who has the whole pool and has published all of it must be able to go on.
TEST_F(ForkSteps, TheIndexLetsGoOfAPageRatherThanRefuse) {
  Forks forks(device, small_pool(2), 16, 0);
  forks.server.pool.publish(forks.talks[0].sequence, forks.talks[0].tokens);
  forks.talks[0].rollback(2);
  forks.expect_as_alone();
  EXPECT_EQ(forks.server.pool.describe().prefixes, 1u);
  EXPECT_EQ(forks.server.pool.describe().evictions, 1u);
}

// Pages of one group, in the plainest way.
class ModelGroup {
 public:
  ModelGroup(const GroupKeys& keys, uint64_t page_tokens, size_t sequences)
      : keys_(keys), page_tokens_(page_tokens), sequences_(sequences) {}

  void clear(size_t at) { sequences_[at] = {}; }
  void fork(size_t from, size_t to) { sequences_[to] = Pages(sequences_[from]); }
  void step(std::span<const size_t> members, std::span<const uint64_t> starts, uint64_t tokens) {
    for (size_t i = 0; i < members.size(); ++i) {
      Pages& pages = sequences_[members[i]];
      while (!pages.held.empty() && keys_.window != 0 &&
             (pages.first + 1) * page_tokens_ + keys_.window <= starts[i] + 1) {
        pages.held.erase(pages.held.begin());
        ++pages.first;
      }
    }
    for (size_t i = 0; i < members.size(); ++i) {
      Pages& pages = sequences_[members[i]];
      const uint64_t at = starts[i] / page_tokens_;
      const bool inside = starts[i] % page_tokens_ != 0 && at >= pages.first &&
                          at < pages.first + pages.held.size();
      if (inside && (keys_.limit == 0 || starts[i] < keys_.limit)) {
        Page& page = pages.held[at - pages.first];
        if (page.use_count() > 1) page = std::make_shared<int>();
      }
      while (pages.first + pages.held.size() < end(starts[i] + tokens))
        pages.held.push_back(std::make_shared<int>());
    }
    std::set<const int*> all;
    for (const Pages& pages : sequences_)
      for (const Page& page : pages.held) all.insert(page.get());
    peak_ = std::max<uint64_t>(peak_, all.size());
  }
  void rollback(size_t at, uint64_t to) {
    Pages& pages = sequences_[at];
    while (!pages.held.empty() && pages.first + pages.held.size() > end(to)) pages.held.pop_back();
    if (pages.held.empty() && (keys_.limit == 0 || to < keys_.limit))
      pages.first = std::min(pages.first, to / page_tokens_);
  }
  uint64_t peak() const { return std::max<uint64_t>(1, peak_); }

 private:
  using Page = std::shared_ptr<int>;
  struct Pages {
    uint64_t first = 0;
    std::vector<Page> held{};
  };
  uint64_t end(uint64_t length) const {
    const uint64_t kept = keys_.limit != 0 ? std::min(keys_.limit, length) : length;
    return (kept + page_tokens_ - 1) / page_tokens_;
  }

  GroupKeys keys_;
  uint64_t page_tokens_;
  std::vector<Pages> sequences_;
  uint64_t peak_ = 0;
};

struct Call {
  enum Kind : uint8_t { step, fork, rollback, leave, publish } kind = step;
  std::vector<size_t> who{};  // of fork: from, to
  uint64_t tokens = 0;
};

constexpr size_t kTalks = 10;
constexpr uint64_t kMaxTokens = 60;

// Calls of a life whose sequences are forked often and step together, and how many pages each group
// then needs.
class Life {
 public:
  Life(const KvPool& pool, uint32_t seed) : random_(seed) {
    for (const PageGroup& group : state_of(pool).groups)
      groups_.emplace_back(group.keys(), pool.options().page_tokens, kTalks);
    for (int i = 0; i < 150; ++i) add();
  }
  const std::vector<Call>& calls() const { return calls_; }
  std::vector<uint64_t> pages() const {
    std::vector<uint64_t> pages;
    for (const ModelGroup& group : groups_) pages.push_back(group.peak());
    return pages;
  }

 private:
  void add() {
    const uint64_t pick = random_() % 100;
    const size_t at = random_() % kTalks;
    if (pick < 60) return add_step();
    if (pick < 80) {
      const size_t to = random_() % kTalks;
      if (to == at) return;
      for (ModelGroup& group : groups_) group.fork(at, to);
      length_[to] = length_[at], last_[to] = last_[at];
      calls_.push_back({Call::fork, {at, to}});
    } else if (pick < 90) {
      if (last_[at] == 0) return;
      const uint64_t drop = 1 + random_() % last_[at];  // the last step can always be rolled back
      length_[at] -= drop, last_[at] -= drop;
      for (ModelGroup& group : groups_) group.rollback(at, length_[at]);
      calls_.push_back({Call::rollback, {at}, drop});
    } else if (pick < 93) {
      leave(at);
    } else {
      calls_.push_back({Call::publish, {at}});
    }
  }
  void add_step() {
    Call call{Call::step, {}, random_() % 4 == 0 ? 1 + random_() % 12 : 1};
    const size_t count = 1 + random_() % 6, first = random_() % kTalks;
    std::vector<uint64_t> starts;
    for (size_t i = 0; i < count; ++i) {
      const size_t at = (first + i) % kTalks;
      if (length_[at] + call.tokens > kMaxTokens) leave(at);
      call.who.push_back(at);
      starts.push_back(length_[at]);
    }
    for (ModelGroup& group : groups_) group.step(call.who, starts, call.tokens);
    for (const size_t at : call.who) length_[at] += call.tokens, last_[at] = call.tokens;
    calls_.push_back(std::move(call));
  }
  void leave(size_t at) {
    for (ModelGroup& group : groups_) group.clear(at);
    length_[at] = last_[at] = 0;
    calls_.push_back({Call::leave, {at}});
  }

  std::mt19937 random_;
  std::vector<ModelGroup> groups_;
  std::array<uint64_t, kTalks> length_{}, last_{};
  std::vector<Call> calls_;
};

// Runs a life; the tokens of every sequence are its own from its next step on.
std::vector<Talk> live(Server& server, const std::vector<Call>& calls) {
  std::vector<Talk> talks;
  for (size_t i = 0; i < kTalks; ++i) talks.push_back(server.talk());
  uint32_t seed = 0;
  for (const Call& call : calls) {
    Talk& talk = talks[call.who[0]];
    if (call.kind == Call::fork) {
      talks[call.who[1]] = talk.fork();
    } else if (call.kind == Call::rollback) {
      talk.rollback(call.tokens);
    } else if (call.kind == Call::leave) {
      talk = server.talk();
    } else if (call.kind == Call::publish) {
      server.pool.publish(talk.sequence, talk.tokens);
    } else {
      std::vector<std::vector<int32_t>> tokens;
      std::vector<TalkStep> steps;
      tokens.reserve(call.who.size());
      for (const size_t at : call.who) {
        tokens.push_back(some_tokens(call.tokens, ++seed));
        steps.push_back({talks[at], tokens.back()});
      }
      server.fill(steps);
    }
  }
  return talks;
}

KvPoolOptions life_pool(uint32_t seed) {
  const uint64_t window = 4 + seed % 20, tail = 1 + seed % 13, sinks = 1 + seed % 11;
  KvPoolOptions options = small_pool(kTalks * 8);
  options.layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4}};
  if (seed % 2 != 0) options.layers.push_back({.window = window});
  if (seed % 3 != 0) options.layers[0].tail = tail;
  if (seed % 5 != 0) options.layers[0].sink_tokens = sinks;
  return options;
}

TEST_F(ForkSteps, AHundredLivesInExactlyThePagesThatSuffice) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    const KvPoolOptions options = life_pool(seed);
    const Life life(KvPool(device, options), seed);
    Server server = exact_server(device, options, life.pages());
    std::vector<Talk> talks;
    ASSERT_NO_THROW(talks = live(server, life.calls()));
    // With one page less of a group the same calls are refused.
    std::vector<uint64_t> fewer = life.pages();
    if (--fewer[seed % fewer.size()] != 0) {
      Server tight = exact_server(device, options, fewer);
      EXPECT_THROW(live(tight, life.calls()), Error);
    }
    // Everybody has the tokens that were given to it.
    Server fresh(device, options, {.max_sequences = 8, .max_tokens = 128});
    const std::vector<int32_t> next = some_tokens(1, 7);
    Talk& talk = talks[seed % kTalks];
    for (Talk& other : talks)
      if (&other != &talk) other = server.talk();
    Talk same = fresh.talk();
    if (talk.length() != 0) fresh.fill(same, talk.tokens);
    EXPECT_EQ(server.run(talk, next), fresh.run(same, next));
    talk = server.talk();
    expect_no_page_used(server.pool);
  }
}

}  // namespace
}  // namespace gyre::test
