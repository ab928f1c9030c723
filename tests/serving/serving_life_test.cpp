// A random life: 64 sequences, 100,000 calls, against a plain model: each sequence is its tokens.
// Sampled outputs must have the bits of a sequence that was computed alone; at the end no page is
// lost.

#include "cache/snapshot_fixture.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

constexpr size_t kSequences = 64;
constexpr uint64_t kMaxTokens = 80;

class Life {
 public:
  // `step_back`: no more than the last step is rolled back, so that every tail stays whole.
  Life(const Device& device, const KvPoolOptions& options, bool step_back)
      : server_(device, options, bounds()),
        alone_(device, options, bounds()),
        random_(7),
        step_back_(step_back),
        last_(kSequences) {
    for (size_t i = 0; i < kSequences; ++i) talks_.push_back(server_.talk());
  }

  void run(uint64_t calls) {
    for (uint64_t i = 0; i < calls; ++i) {
      const uint64_t pick = random_() % 1000;
      try {
        call(pick);
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();
        ++refused_;
        put(server_.talk());  // somebody leaves
      }
      for (const Talk& one : talks_) ASSERT_EQ(one.length(), one.tokens.size());
      if (i % 1000 == 0) check_counts();
    }
  }

  void finish() {
    EXPECT_GE(refused_, 50u);
    EXPECT_GE(matched_, 500u);
    EXPECT_GE(compared_, 100u);
    EXPECT_GE(server_.pool.describe().evictions, 100u);
    talks_.clear();
    check_counts();
    expect_no_page_used(server_.pool);
    server_.pool.forget();
    for (const KvGroupInfo& group : server_.pool.describe().groups)
      EXPECT_EQ(group.free, group.pages) << group.name;
    EXPECT_EQ(server_.pool.describe().sequences, 0u);
  }

 private:
  static KvBatchOptions bounds() { return {.max_sequences = 6, .max_tokens = 96}; }
  size_t some() { return random_() % kSequences; }
  Talk& talk() { return talks_[some()]; }
  void put(Talk made, uint64_t last = 0) {
    const size_t at = some();
    talks_[at] = std::move(made);
    last_[at] = last;
  }

  // Few different beginnings, so that prefixes are shared.
  std::vector<int32_t> tokens(uint64_t begin, uint64_t count, uint32_t kind) const {
    std::vector<int32_t> made(count);
    for (uint64_t i = 0; i < count; ++i)
      made[i] = static_cast<int32_t>((begin + i) * 31 + kind * 1000003);
    return made;
  }

  void call(uint64_t pick) {
    if (pick < 500) return append();
    if (pick < 600) {
      const size_t from = some();
      put(talks_[from].fork(), last_[from]);
    } else if (pick < 700) {
      rollback(some());
    } else if (pick < 720) {
      put(server_.talk());
    } else if (pick < 850) {
      const Talk& one = talk();
      server_.pool.publish(one.sequence, one.tokens);
    } else if (pick < 980) {
      const std::vector<int32_t> wanted = tokens(0, 8 + random_() % 60, kind());
      Talk made = server_.match(wanted);
      matched_ += made.length() != 0 ? 1 : 0;
      put(std::move(made));
    } else if (pick < 996) {
      travel(talk());
    } else if (pick < 998) {
      compare(some());
    } else if (pick == 998) {
      file(talk());
    } else if (random_() % 8 == 0) {
      prefixes();
    }
  }

  uint32_t kind() { return static_cast<uint32_t>(random_() % 6); }

  void append() {
    std::vector<std::vector<int32_t>> given;
    std::vector<TalkStep> steps;
    given.reserve(6);
    const size_t first = random_() % kSequences, count = 1 + random_() % 6;
    for (size_t i = 0; i < count; ++i) {
      Talk& one = talks_[(first + i) % kSequences];
      uint64_t more = random_() % 3 == 0 ? 1 + random_() % 16 : 1;
      if (one.length() + more > kMaxTokens) one.sequence.clear(), one.tokens.clear();
      // A beginning that others have too, later tokens of its own.
      const uint32_t own =
          one.tokens.empty() ? kind() : static_cast<uint32_t>(one.tokens[0] / 1000003);
      given.push_back(tokens(one.length(), more, random_() % 10 == 0 ? kind() : own));
      steps.push_back({one, given.back(), random_() % 2 == 0});
    }
    server_.fill(steps);
    for (size_t i = 0; i < count; ++i) last_[(first + i) % kSequences] = steps[i].tokens.size();
  }

  void rollback(size_t at) {
    Talk& one = talks_[at];
    const uint64_t limit = step_back_ ? last_[at] : std::min<uint64_t>(one.length(), 12);
    if (limit == 0) return;
    const uint64_t drop = 1 + random_() % limit;
    try {
      one.rollback(drop);
      last_[at] -= std::min(last_[at], drop);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      ASSERT_NE(std::string(error.what()).find("window"), std::string::npos);
    }
  }

  // Exports a sequence and imports it again page by page.
  void travel(Talk& one) {
    Talk made{server_.pool.sequence(), one.tokens};
    const uint64_t page_tokens = server_.pool.options().page_tokens;
    for (uint64_t page = 0; page * page_tokens < one.length(); ++page)
      server_.pool.import_page(made.sequence, server_.pool.export_page(one.sequence, page));
    one = std::move(made);
  }

  void file(Talk& one) {
    server_.pool.save(one.sequence, folder_ / "sequence");
    one = {server_.pool.load(folder_ / "sequence"), one.tokens};
  }

  void prefixes() {
    server_.pool.save_prefixes(folder_ / "prefixes");
    server_.pool.forget();
    try {
      server_.pool.load_prefixes(folder_ / "prefixes");
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();  // used and cached as well
    }
  }

  void compare(size_t at) {
    Talk& one = talks_[at];
    const std::vector<int32_t> next = tokens(900, 2, 3);
    Talk same = alone_.talk();
    const std::vector<int32_t> had = one.tokens;
    if (!had.empty()) alone_.fill(same, had);
    EXPECT_EQ(server_.run(one, next), alone_.run(same, next));
    last_[at] = next.size();
    ++compared_;
  }

  void check_counts() const {
    for (const KvGroupInfo& group : server_.pool.describe().groups)
      ASSERT_EQ(group.used + group.cached + group.free, group.pages) << group.name;
  }

  Server server_, alone_;
  std::vector<Talk> talks_;
  std::mt19937 random_;
  bool step_back_;
  std::vector<uint64_t> last_;  // tokens of the last step that are still there
  Folder folder_;
  uint64_t refused_ = 0, matched_ = 0, compared_ = 0;
};

KvPoolOptions pool_of(const std::vector<KvLayer>& layers) {
  return {.kv_heads = 1,
          .head_dim = 16,
          .layers = layers,
          .pages = 260,
          .page_tokens = 8,
          .sequences = kSequences,
          .step_tokens = 96};
}

TEST(ServingLife, AHundredThousandCalls) {
  Life life(Device::open("cpu", {.threads = 1}),
            pool_of({{.k = KvFormat::tq8, .v = KvFormat::tq4},
                     {.k = KvFormat::f16, .v = KvFormat::f16, .window = 20}}),
            false);
  life.run(100'000);
  life.finish();
}

// Behind a tail, truncating leaves older keys compressed that a sequence computed alone has in 16
// bits: so not further than a step.
TEST(ServingLife, WithTailsAndSinks) {
  Life life(Device::open("cpu", {.threads = 1}),
            pool_of({{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 12, .sink_tokens = 4}}),
            true);
  life.run(60'000);
  life.finish();
}

}  // namespace
}  // namespace gyre::test
