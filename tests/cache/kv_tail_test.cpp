// The 16-bit tail is the query's: whatever the step, query i sees the newest `tail` keys up to its
// own in 16 bits and older ones as the body stores them.
#include <cstdio>

#include "cache/kv_cache_model.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

using F = KvFormat;

KvCacheOptions with_steps(const KvLayer& layer, uint64_t capacity, uint64_t step_tokens) {
  KvCacheOptions options = small(layer, capacity);
  options.step_tokens = step_tokens;
  return options;
}

std::vector<std::byte> saved(const KvCache& cache) {
  const Folder folder;
  cache.save(folder / "a");
  return bytes_of_file(folder / "a");
}

uint64_t tail_begin_of(const KvCache& cache) {
  const Folder folder;
  cache.save(folder / "a");
  return inspect_snapshot(folder / "a").tail_begin;
}

struct Steps {
  KvLayer layer;
  uint64_t capacity, step_tokens;
  std::vector<uint64_t> steps;
};

class KvTail : public testing::TestWithParam<Steps> {};

// Every query of every step, and of the last tokens once more.
TEST_P(KvTail, IsDefinedPerQuery) {
  const Steps& c = GetParam();
  CacheModel model(with_steps(c.layer, c.capacity, c.step_tokens));
  for (const uint64_t tokens : c.steps) {
    model.append(tokens);
    ASSERT_TRUE(model.holds(0, {.tokens = tokens})) << tokens << " at " << model.cache.length();
  }
  Question ask{.tokens = std::min<uint64_t>(c.steps.back(), 5)};
  for (const uint64_t window : {1, 3, 20, 70}) {
    if (c.layer.window != 0 && window > c.layer.window) continue;
    ask.window = window;
    EXPECT_TRUE(model.holds(0, ask)) << "window " << window;
    ask.causal = false;
    EXPECT_TRUE(model.holds(0, ask)) << "window " << window << ", not causal";
    ask.causal = true;
    ask.tree_mask = true;
    EXPECT_TRUE(model.holds(0, ask)) << "window " << window << ", tree_mask";
    ask.tree_mask = false;
  }
}

std::vector<uint64_t> repeated(uint64_t tokens, uint64_t times) {
  return std::vector<uint64_t>(times, tokens);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, KvTail,
    testing::Values(
        // The ring of 16 + 1 slots wraps twice.
        Steps{{.k = F::tq8, .v = F::tq4, .tail = 16}, 60, 1, repeated(1, 40)},
        Steps{{.k = F::tq4, .v = F::tq2, .tail = 1, .sink_tokens = 2}, 60, 3, repeated(3, 12)},
        Steps{{.k = F::tq8, .v = F::tq4, .tail = 20, .sink_tokens = 5}, 400, 64, repeated(64, 5)},
        Steps{{.k = F::tq4, .v = F::tq8, .tail = 128}, 1200, 512, {512, 512, 1, 3}},
        Steps{{.k = F::tq8, .v = F::tq4, .tail = 30, .sink_tokens = 70}, 700, 512, {512, 1, 60, 3}},
        // Windows that the tail is shorter and longer than.
        Steps{{.k = F::tq8, .v = F::tq4, .window = 50, .tail = 9}, 400, 64, {64, 1, 64, 64, 3}},
        Steps{{.k = F::tq8, .v = F::tq4, .window = 9, .tail = 50}, 400, 64, {64, 1, 64, 64, 3}},
        // A ring that never wraps, and a step that fills the cache.
        Steps{{.k = F::tq8, .v = F::f16, .tail = 90, .sink_tokens = 3}, 100, 512, {40, 1, 59}},
        Steps{{.k = F::tq6, .v = F::tq6, .tail = 12}, 100, 100, {100}}));

// Equal tokens in steps of different sizes are the same bytes.
TEST(KvTailBytes, DoNotDependOnTheSteps) {
  for (const KvLayer& layer : {KvLayer{.k = F::tq8, .v = F::tq4, .tail = 20, .sink_tokens = 3},
                               KvLayer{.k = F::tq3, .v = F::tq2, .window = 60, .tail = 20},
                               KvLayer{.k = F::bf16, .v = F::tq5, .tail = 7}}) {
    const KvCacheOptions options = with_steps(layer, 300, 150);
    constexpr uint64_t kTokens = 290;
    CacheModel one(options);
    const std::vector<float> k = one.fresh(kTokens * kKvHeads * kDim),
                             v = one.fresh(kTokens * kKvHeads * kValueDim);
    const Tensor all_k = one.tensor(k, {kTokens, kKvHeads, kDim}),
                 all_v = one.tensor(v, {kTokens, kKvHeads, kValueDim});
    std::vector<std::byte> first;
    for (const uint64_t step : {1, 3, 64, 150}) {
      KvCache cache(one.device, options);
      for (uint64_t at = 0; at < kTokens; at += step) {
        const uint64_t tokens = std::min(step, kTokens - at);
        cache.begin_step(one.encoder, tokens);
        cache.append(one.encoder, 0, all_k.slice(0, at, tokens), all_v.slice(0, at, tokens));
        one.encoder.submit().wait();
      }
      const std::vector<std::byte> bytes = saved(cache);
      if (first.empty()) first = bytes;
      EXPECT_TRUE(bytes == first) << name(layer.k) << " in steps of " << step;
    }
  }
}

// A prompt in one step and token by token: the same keys in the same precision, so that answers
// differ by the kernels' rounding alone. Before, a step compressed most of itself first.
TEST(KvTailAnswers, DoNotDependOnTheSteps) {
  constexpr uint64_t kTokens = 200;
  const KvCacheOptions options =
      with_steps({.k = F::tq4, .v = F::tq2, .tail = 48, .sink_tokens = 2}, 300, kTokens);
  CacheModel model(options);
  const std::vector<float> k = model.fresh(kTokens * kKvHeads * kDim),
                           v = model.fresh(kTokens * kKvHeads * kValueDim),
                           q = model.fresh(kTokens * kHeads * kDim);
  const Tensor all_k = model.tensor(k, {kTokens, kKvHeads, kDim}),
               all_v = model.tensor(v, {kTokens, kKvHeads, kValueDim}),
               all_q = model.tensor(q, {kTokens, kHeads, kDim});
  const auto answers = [&](uint64_t step) {
    KvCache cache(model.device, options);
    const Tensor out = model.device.tensor(DType::f32, {kTokens, kHeads, kValueDim});
    for (uint64_t at = 0; at < kTokens; at += step) {
      cache.begin_step(model.encoder, step);
      cache.append(model.encoder, 0, all_k.slice(0, at, step), all_v.slice(0, at, step));
      cache.attend(model.encoder, 0, {.q = all_q.slice(0, at, step), .out = out.slice(0, at, step)},
                   {.scale = 0.125f});
      model.encoder.submit().wait();
    }
    const std::vector<float> values = floats_of(out);
    return std::vector<double>(values.begin(), values.end());
  };
  const std::vector<double> singly = answers(1);
  for (const uint64_t step : {5, 50, 200})
    EXPECT_LE(nmse(answers(step), singly), prompt_bound(1e-7)) << step;
}

// A step that is taken back and given again has the same bits; so have a copy and a loaded cache.
TEST(KvTailAnswers, AreTheSameBitsAgain) {
  for (const KvLayer& layer : {KvLayer{.k = F::tq8, .v = F::tq4, .tail = 20, .sink_tokens = 3},
                               KvLayer{.k = F::tq8, .v = F::tq4, .window = 60, .tail = 20}}) {
    CacheModel model(with_steps(layer, 300, 64));
    model.append(64);
    model.append(57);
    const KvCache before = model.cache.fork(model.encoder);
    model.encoder.submit().wait();
    const std::vector<std::byte> bytes = saved(model.cache);
    EXPECT_TRUE(saved(before) == bytes);
    for (const uint64_t tokens : {1, 7, 64}) {
      const std::vector<float> k = model.fresh(tokens * kKvHeads * kDim),
                               v = model.fresh(tokens * kKvHeads * kValueDim),
                               q = model.fresh(tokens * kHeads * kDim);
      const Tensor out = model.device.tensor(DType::f32, {tokens, kHeads, kValueDim});
      const auto step = [&](KvCache& cache) {
        cache.begin_step(model.encoder, tokens);
        cache.append(model.encoder, 0, model.tensor(k, {tokens, kKvHeads, kDim}),
                     model.tensor(v, {tokens, kKvHeads, kValueDim}));
        cache.attend(model.encoder, 0, {.q = model.tensor(q, {tokens, kHeads, kDim}), .out = out},
                     {.scale = 0.125f});
        model.encoder.submit().wait();
        return floats_of(out);
      };
      const std::vector<float> first = step(model.cache);
      model.cache.rollback(model.encoder, tokens);
      EXPECT_EQ(step(model.cache), first) << tokens << " tokens again";
      model.cache.rollback(model.encoder, tokens);
      KvCache copy = before.fork(model.encoder);
      EXPECT_EQ(step(copy), first) << tokens << " tokens of a copy";
      const Folder folder;
      before.save(folder / "a");
      copy.load(folder / "a");
      EXPECT_EQ(step(copy), first) << tokens << " tokens of a loaded cache";
    }
  }
}

// Slots of the ring: tail and a step. What it held before is gone, and comes back with new tokens.
TEST(KvTailRing, SaysFromWhereItHolds) {
  constexpr uint64_t kTail = 20, kStep = 64;
  CacheModel model(
      with_steps({.k = F::tq8, .v = F::tq4, .tail = kTail, .sink_tokens = 3}, 400, kStep));
  const auto expect = [&](uint64_t begin) {
    EXPECT_EQ(tail_begin_of(model.cache), begin) << "at " << model.cache.length();
    EXPECT_TRUE(model.holds(0, {.tokens = 5})) << "at " << model.cache.length();
  };
  for (int i = 0; i < 4; ++i) model.append(kStep);
  expect(256 - kTail - kStep);  // 172
  model.rollback(kStep);
  expect(172);  // exactly the tail
  model.append(30);
  expect(172);
  model.rollback(40);  // length 182
  expect(172);
  model.append(1);
  expect(172);
  model.rollback(100);  // deeper than anything the ring holds
  expect(83);
  model.append(10);
  expect(83);
  model.append(kStep);
  model.append(kStep);
  expect(83 + 10 + 2 * kStep - kTail - kStep);
  model.clear();
  model.append(kStep);
  expect(0);
}

}  // namespace
}  // namespace gyre::test
