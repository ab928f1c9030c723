// What docs/serving.md promises, bit for bit: a sequence's output follows from its tokens alone.

#include "attention/attention_tolerance.h"
#include "serving/serving_fixture.h"
#include "test_device.h"

namespace gyre::test {
namespace {

class Promises : public testing::TestWithParam<KvPoolOptions> {
 public:
  Server server(uint64_t pages = 64) const {
    KvPoolOptions options = GetParam();
    options.pages = pages;
    return Server(device, options, {.max_sequences = 16, .max_tokens = 256});
  }

  Device device = test_device();
};

// The prompt as a whole and a few answers, computed alone in an empty pool.
struct Cold {
  Bits prompt, answers;
};
Cold cold_run(Server server, std::span<const int32_t> prompt, std::span<const int32_t> answers) {
  Cold cold;
  Talk talk = server.talk();
  cold.prompt = server.prompt(talk, prompt, 128);
  for (const int32_t& token : answers) {
    const Bits bits = server.run(talk, std::span(&token, 1));
    cold.answers.insert(cold.answers.end(), bits.begin(), bits.end());
  }
  return cold;
}
Bits answers_of(Server& server, Talk& talk, std::span<const int32_t> answers) {
  Bits all;
  for (const int32_t& token : answers) {
    const Bits bits = server.run(talk, std::span(&token, 1));
    all.insert(all.end(), bits.begin(), bits.end());
  }
  return all;
}

TEST_P(Promises, ChunksOfAPromptDoNotMatter) {
  const std::vector<int32_t> prompt = some_tokens(75, 1), answers = some_tokens(5, 2);
  const Cold cold = cold_run(server(), prompt, answers);
  for (const uint64_t chunk : {1u, 7u, 16u, 64u}) {
    Server other = server();
    Talk talk = other.talk();
    EXPECT_EQ(other.prompt(talk, prompt, chunk), cold.prompt) << chunk;
    EXPECT_EQ(answers_of(other, talk, answers), cold.answers) << chunk;
  }
}

TEST_P(Promises, ColdEqualsWarm) {
  const std::vector<int32_t> prompt = some_tokens(75, 1), answers = some_tokens(5, 2);
  const Cold cold = cold_run(server(), prompt, answers);
  const size_t row = cold.prompt.size() / prompt.size();
  Server warm = server();
  {
    Talk first = warm.talk();
    // Published after every chunk: a match may end at any page.
    for (uint64_t at = 0; at < prompt.size(); at += 13) {
      warm.run(first, std::span(prompt).subspan(at, std::min<size_t>(13, prompt.size() - at)),
               true);
      warm.pool.publish(first.sequence, first.tokens);
    }
    answers_of(warm, first, some_tokens(20, 3));
  }
  const uint64_t page_tokens = GetParam().page_tokens;
  for (uint64_t known = 0; known <= prompt.size(); known += page_tokens) {
    std::vector<int32_t> other = prompt;
    if (known < other.size()) ++other[known];
    Talk talk = warm.match(other);
    ASSERT_EQ(talk.length(), known);
    talk.tokens.assign(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(known));
    const Bits rest = warm.prompt(talk, std::span(prompt).subspan(known), 32);
    EXPECT_EQ(rest,
              Bits(cold.prompt.begin() + static_cast<ptrdiff_t>(known * row), cold.prompt.end()))
        << known;
    EXPECT_EQ(answers_of(warm, talk, answers), cold.answers) << known;
  }
}

TEST_P(Promises, WhoSharesTheBatchDoesNotMatter) {
  const std::vector<int32_t> prompt = some_tokens(40, 1), answers = some_tokens(6, 2);
  const Cold cold = cold_run(server(), prompt, answers);
  Server crowd = server(256);
  std::vector<Talk> others;
  std::mt19937 random(5);
  for (uint32_t i = 0; i < 9; ++i) {
    others.push_back(crowd.talk());
    crowd.fill(others.back(), some_tokens(1 + random() % 60, 50 + i));
  }
  Talk talk = crowd.talk();
  Bits seen;
  // Others decode, or take prompts of their own, before and after in the same rows.
  const auto step = [&](std::span<const int32_t> tokens, bool is_prompt) {
    std::vector<std::vector<int32_t>> given;
    for (size_t i = 0; i < others.size(); ++i)
      given.push_back(some_tokens(1 + random() % 5, static_cast<uint32_t>(random())));
    std::vector<TalkStep> steps;
    const size_t place = random() % (others.size() + 1);
    for (size_t i = 0; i <= others.size(); ++i) {
      if (i == place) steps.push_back({talk, tokens, is_prompt});
      if (i < others.size() && random() % 3 != 0)
        steps.push_back({others[i], given[i], given[i].size() > 2});
    }
    size_t mine = 0;
    while (&steps[mine].talk != &talk) ++mine;
    const Bits bits = crowd.run(steps)[mine];
    seen.insert(seen.end(), bits.begin(), bits.end());
  };
  for (uint64_t at = 0; at < prompt.size(); at += 9)
    step(std::span(prompt).subspan(at, std::min<size_t>(9, prompt.size() - at)), true);
  EXPECT_EQ(seen, cold.prompt);
  seen.clear();
  for (const int32_t& token : answers) step(std::span(&token, 1), false);
  EXPECT_EQ(seen, cold.answers);
}

TEST_P(Promises, ForksDoNotSeeEachOther) {
  const std::vector<int32_t> prompt = some_tokens(43, 1);
  Server shared = server();
  Talk base = shared.talk();
  shared.prompt(base, prompt, 64);
  std::vector<Talk> forks;
  for (int i = 0; i < 4; ++i) forks.push_back(base.fork());
  std::vector<std::vector<int32_t>> answers;
  for (uint32_t i = 0; i < 4; ++i) answers.push_back(some_tokens(12, 10 + i));
  std::vector<Bits> seen(4);
  for (size_t at = 0; at < 12; ++at) {
    std::vector<TalkStep> steps;
    for (size_t i = 0; i < 4; ++i)
      steps.push_back({forks[i], std::span(answers[i]).subspan(at, 1)});
    const std::vector<Bits> bits = shared.run(steps);
    for (size_t i = 0; i < 4; ++i) seen[i].insert(seen[i].end(), bits[i].begin(), bits[i].end());
  }
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(seen[i], cold_run(server(), prompt, answers[i]).answers) << i;
}

// Rejected drafts leave nothing behind.
TEST_P(Promises, ATruncatedStepWasNeverThere) {
  const std::vector<int32_t> prompt = some_tokens(43, 1), answers = some_tokens(5, 2);
  const uint64_t draft = GetParam().page_tokens + 1;
  Server drafts = server();
  Talk one = drafts.talk(), two = drafts.talk();
  drafts.prompt(one, prompt, 64);
  drafts.prompt(two, prompt, 64);
  Bits first, second;
  for (const int32_t& token : answers) {
    const std::vector<int32_t> rejected = some_tokens(draft, static_cast<uint32_t>(token));
    for (int i = 0; i < 2; ++i) {
      const TalkStep more[] = {{one, rejected}, {two, rejected}};
      drafts.run(more);
      one.rollback(draft);
      two.rollback(draft);
    }
    const TalkStep steps[] = {{one, std::span(&token, 1)}, {two, std::span(&token, 1)}};
    const std::vector<Bits> bits = drafts.run(steps);
    first.insert(first.end(), bits[0].begin(), bits[0].end());
    second.insert(second.end(), bits[1].begin(), bits[1].end());
  }
  const Bits expected = cold_run(server(), prompt, answers).answers;
  EXPECT_EQ(first, expected);
  EXPECT_EQ(second, expected);
}

// A step that was begun and dropped: nothing of it reached the device.
TEST_P(Promises, ACancelledStepWasNeverThere) {
  const std::vector<int32_t> prompt = some_tokens(43, 1), answers = some_tokens(20, 2);
  Server dropped = server();
  Talk talk = dropped.talk();
  dropped.prompt(talk, prompt, 64);
  const Talk fork = talk.fork();  // the step copies a page
  Bits seen;
  for (const int32_t& token : answers) {
    const TalkStep step{talk, std::span(&token, 1)};
    dropped.begin_step(std::span(&step, 1));
    dropped.batch.rollback();
    dropped.encoder.clear();
    const Bits bits = dropped.run(talk, std::span(&token, 1));
    seen.insert(seen.end(), bits.begin(), bits.end());
  }
  EXPECT_EQ(seen, cold_run(server(), prompt, answers).answers);
}

// Each sequence gives pages back and gets the other's: tables of the same rows must follow.
TEST_P(Promises, TablesFollowPagesThatChangeHands) {
  const uint64_t page = GetParam().page_tokens;
  const std::vector<int32_t> prompt = some_tokens(page, 1);
  const std::vector<int32_t> more[] = {some_tokens(page + 2, 2), some_tokens(page + 2, 3)};
  Server swaps = server();
  Talk talks[] = {swaps.talk(), swaps.talk()};
  std::vector<Bits> expected;
  for (size_t i = 0; i < 2; ++i) {
    swaps.prompt(talks[i], prompt, 128);
    Server alone = server();
    Talk talk = alone.talk();
    alone.prompt(talk, prompt, 128);
    expected.push_back(alone.run(talk, more[i]));
  }
  for (int i = 0; i < 4; ++i) {
    const TalkStep steps[] = {{talks[0], more[0]}, {talks[1], more[1]}};
    EXPECT_EQ(swaps.run(steps), expected) << i;
    for (Talk& talk : talks) {
      if (i % 2 == 0) talk.rollback(2);  // page by page, or both at once
      talk.rollback(i % 2 == 0 ? page : page + 2);
    }
  }
}

// A graph recorded once gives what the steps give that are recorded one by one.
TEST_P(Promises, ARecordedStepServesEveryBatch) {
  Server eager = server(), replayed = server();
  constexpr uint64_t kRows = 12;
  const std::vector<KvLayer>& layers = replayed.pool.layers();
  std::vector<Tensor> q, k, v, out;
  replayed.batch.record();
  for (uint64_t layer = 0; layer < layers.size(); ++layer) {
    const KvLayer& l = layers[layer];
    const uint64_t heads = replayed.heads(layer);
    q.push_back(device.tensor(DType::f32, {kRows, heads, l.head_dim}));
    k.push_back(device.tensor(DType::f32, {kRows, l.kv_heads, l.head_dim}));
    v.push_back(device.tensor(DType::f32, {kRows, l.kv_heads, l.v_head_dim}));
    out.push_back(device.tensor(DType::f32, {kRows, heads, l.v_head_dim}));
    if (!l.kv_shared_layer_index)
      replayed.batch.append(replayed.encoder, layer, k[layer], v[layer]);
    replayed.batch.attend(replayed.encoder, layer, {.q = q[layer], .out = out[layer]},
                          {.scale = 0.125f});
  }
  replayed.batch.end_step();
  const Graph graph = replayed.encoder.instantiate();
  std::vector<Talk> a, b;
  for (int i = 0; i < 3; ++i) a.push_back(eager.talk()), b.push_back(replayed.talk());
  std::mt19937 random(9);
  const auto put = [&](const Tensor& to, const Tensor& rows) {
    // Rows beyond the step's are skipped, whatever they hold.
    to.write_from(std::span<const float>(std::vector<float>(to.elements(), 1e3f)));
    copy_floats(rows, to.slice(0, 0, rows.shape(0)));
  };
  for (int round = 0; round < 12; ++round) {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<TalkStep> one, two;
    for (size_t i = 0; i < 3; ++i)
      tokens.push_back(some_tokens(1 + random() % 4, static_cast<uint32_t>(random())));
    for (size_t i = 0; i < 3; ++i) {
      if (random() % 4 == 0) continue;
      one.push_back({a[i], tokens[i]});
      two.push_back({b[i], tokens[i]});
    }
    if (one.empty()) continue;
    const std::vector<Bits> expected = eager.run(one);
    for (uint64_t layer = 0; layer < layers.size(); ++layer) {
      const KvLayer& l = layers[layer];
      put(q[layer], replayed.rows(two, {layer, 2}, replayed.heads(layer), l.head_dim));
      put(k[layer], replayed.rows(two, {layer, 0}, l.kv_heads, l.head_dim));
      put(v[layer], replayed.rows(two, {layer, 1}, l.kv_heads, l.v_head_dim));
    }
    replayed.begin_step(two);
    replayed.encoder.submit();
    graph.replay().wait();
    replayed.batch.end_step();
    Server::note(two);
    uint64_t row = 0;
    for (size_t i = 0; i < two.size(); ++i) {
      Bits bits;
      for (uint64_t t = 0; t < two[i].tokens.size(); ++t, ++row) {
        for (const Tensor& values : out) add_row(values, row, bits);
      }
      EXPECT_EQ(bits, expected[i]) << round;
    }
  }
}

KvPoolOptions with_pages(KvPoolOptions options, uint64_t page_tokens) {
  options.page_tokens = page_tokens;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Pools, Promises,
                         testing::Values(small_pool(), with_pages(small_pool(), 64), mixed_pool(),
                                         with_pages(mixed_pool(), 16), layered_pool()));

// A sequence alone in a pool gives what a KvCache gives.
TEST(Serving, EightUsersOfOnePromptUseItsMemoryOnce) {
  const Device device = Device::open("cpu", {.threads = 2});
  const KvPoolOptions options = {.kv_heads = 2,
                                 .head_dim = 32,
                                 .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4}},
                                 .pages = 320};
  const std::vector<int32_t> prompt = some_tokens(2000, 1);
  Server server(device, options, {.max_sequences = 8, .max_tokens = 512});
  Talk base = server.talk();
  server.prompt(base, prompt, 512);
  const uint64_t one = server.pool.describe().used_bytes;
  EXPECT_EQ(one, 32 * server.pool.describe().groups[0].page_bytes);  // 2000 / 64, rounded up
  std::vector<Talk> users;
  for (int i = 0; i < 8; ++i) users.push_back(base.fork());
  EXPECT_EQ(server.pool.describe().used_bytes, one);
  EXPECT_EQ(server.pool.describe().groups[0].shared, 32u);
  std::vector<std::vector<int32_t>> tokens;
  for (uint32_t i = 0; i < 8; ++i) tokens.push_back(some_tokens(1, 10 + i));
  std::vector<TalkStep> steps;
  for (size_t i = 0; i < 8; ++i) steps.push_back({users[i], tokens[i]});
  const std::vector<Bits> seen = server.run(steps);
  // The prompt's last page is not full: each has its own copy of it now.
  EXPECT_EQ(server.pool.describe().groups[0].used, 32u + 8u);
  Server apart(device, options, {.max_sequences = 8, .max_tokens = 512});
  for (size_t i = 0; i < 8; ++i) {
    Talk alone = apart.talk();
    apart.prompt(alone, prompt, 512);
    EXPECT_EQ(apart.run(alone, tokens[i]), seen[i]) << i;
  }
}

}  // namespace
}  // namespace gyre::test
