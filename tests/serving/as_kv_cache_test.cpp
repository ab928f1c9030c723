// Pages give what a KvCache gives.
#include <cmath>

#include "attention/attention_tolerance.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

// A layer in pages, and the same layer in a cache.
struct InBoth {
  InBoth(const Device& device, const KvLayer& layer, uint64_t heads_per_kv = 2)
      : server(device,
               {.kv_heads = 2, .head_dim = 64, .layers = {layer}, .pages = 8, .page_tokens = 64},
               {.max_sequences = 1, .max_tokens = 128}, heads_per_kv),
        talk(server.talk()),
        cache(device, {.kv_heads = 2,
                       .head_dim = 64,
                       .capacity = 512,
                       .layers = {layer},
                       .step_tokens = 128}),
        encoder(device) {}

  // The squared error of pages against the cache, over the output's squares.
  double step(std::span<const int32_t> tokens, bool is_prefill) {
    const TalkStep step{talk, tokens};
    const Tensor k = server.rows(std::span(&step, 1), {0, 0}, 2, 64),
                 v = server.rows(std::span(&step, 1), {0, 1}, 2, 64),
                 q = server.rows(std::span(&step, 1), {0, 2}, server.heads(0), 64),
                 out = encoder.device().tensor(DType::f32, q.shape());
    cache.begin_step(encoder, tokens.size());
    cache.append(encoder, 0, k, v);
    cache.attend(encoder, 0, {.q = q, .out = out}, {.scale = 0.125f});
    encoder.submit().wait();
    const Bits seen = server.run(talk, tokens, is_prefill);
    const std::span<const float> expected = out.data<const float>();
    EXPECT_EQ(seen.size(), expected.size());
    double error = 0, power = 0;
    for (size_t i = 0; i < seen.size(); ++i) {
      error += std::pow(std::bit_cast<float>(seen[i]) - expected[i], 2);
      power += std::pow(expected[i], 2);
    }
    return error / power;
  }

  Server server;
  Talk talk;
  KvCache cache;
  Encoder encoder;
};

class AsKvCacheLayers : public testing::TestWithParam<KvLayer> {};

TEST_P(AsKvCacheLayers, TheSameOutput) {
  InBoth both(Device::open("cpu", {.threads = 2}), GetParam());
  uint32_t seed = 1;
  for (const uint64_t count : {1u, 100u, 128u, 1u, 3u, 1u, 1u, 17u, 1u}) {
    // Layers of all keys are cut alike. Rings of a cache are cut at other keys than pages are:
    // partial states are then merged in another order, and rounded weights differ in the last bit.
    const bool rings = GetParam().window != 0 || GetParam().tail != 0;
    EXPECT_LE(both.step(some_tokens(count, seed++), false), rings ? prompt_bound(1e-7) : 0)
        << count << " tokens at " << both.talk.length();
  }
}

// Pages compute a marked prompt as a prompt, however short, so that its bits do not depend on its
// chunks. A cache decodes up to 16 rows (tokens times query heads of a KV head): formats but tq
// then sum in another order, be it K's or V's.
TEST(AsKvCache, MarkedPromptsOfFewRowsAreCloseToACache) {
  using F = KvFormat;
  const Device device = Device::open("cpu", {.threads = 2});
  const auto is_tq = [](F format) { return name(format).starts_with("tq"); };
  double largest = 0;
  for (const auto& [k, v] : {std::pair{F::f32, F::f32},
                             {F::f16, F::f16},
                             {F::bf16, F::bf16},
                             {F::tq8, F::tq8},
                             {F::tq4, F::f16},
                             {F::bf16, F::tq2},
                             {F::tq8, F::mlx_native4}}) {
    for (const uint64_t heads_per_kv : {1u, 4u, 8u}) {
      InBoth both(device, {.k = k, .v = v}, heads_per_kv);
      both.step(some_tokens(7, 2), false);  // so that one token sees others
      for (uint64_t count = 1; count <= 20; ++count) {
        const bool other_kernel = (!is_tq(k) || !is_tq(v)) && count * heads_per_kv <= 16;
        const double error = both.step(some_tokens(count, 3), true);
        EXPECT_LE(error, other_kernel ? 1e-5 : 0) << name(k) << "/" << name(v) << ", " << count
                                                  << " tokens, " << heads_per_kv << " heads";
        largest = std::max(largest, error);
      }
    }
  }
  EXPECT_GT(largest, 0)
      << "the other kernel is not used: say in docs/serving.md that bits are equal";
}

INSTANTIATE_TEST_SUITE_P(
    Layers, AsKvCacheLayers,
    testing::Values(KvLayer{.k = KvFormat::tq8, .v = KvFormat::tq4},
                    KvLayer{.k = KvFormat::f16, .v = KvFormat::f16},
                    KvLayer{.k = KvFormat::f16, .v = KvFormat::f16, .window = 40},
                    KvLayer{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 32},
                    KvLayer{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 32, .sink_tokens = 4}));

}  // namespace
}  // namespace gyre::test
