// Where the arithmetic of attention could lose something: tails, tiny and huge numbers, NaN, sinks.
#include <cstring>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "expect_error.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The kernel's accumulator has 1024 floats.
TEST(AttentionEdge, MergeRefusesLargeHeads) {
  const Device d = cpu_device();
  const Tensor partial = d.tensor(DType::f32, {1, 1, 1, 1024 + 8 + 2});
  const Tensor out = d.tensor(DType::f32, {1, 1, 1024 + 8});
  Encoder encoder(d);
  EXPECT_REFUSED(("attention_merge", "1024", "1034"),
                 attention_merge(encoder, {partial, out, {}, {}}));
}

// All values are 1, so the average is 1, whatever the weights.
void expect_ones(KvFormat format, uint64_t keys, float gap, double bound, uint64_t splits = 0) {
  Small s{.format = format, .splits = splits};
  s.q.assign(s.dim, 0.0f);
  s.q[0] = 1;
  s.k.assign(keys * s.dim, 0.0f);
  s.k[0] = gap;  // the first key stands out
  s.v.assign(keys * s.dim, 0.0f);
  for (uint64_t key = 0; key < keys; ++key) s.v[key * s.dim] = 1;
  const Small::Answer answer = s.run();
  EXPECT_NEAR(answer.out[0], 1, bound) << name(format) << " " << keys << " keys, gap " << gap;
}

TEST(AttentionEdge, OneLargeLogitKeepsTheTail) {
  for (const KvFormat format :
       {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq8, KvFormat::tq4}) {
    const bool levels = describe(format).compressed;
    for (const float gap : {5.5f, 6.0f, 6.4f, 7.0f}) {
      expect_ones(format, 64, gap, levels ? 2e-2 : 1e-3);
      expect_ones(format, 1000, gap, levels ? 2e-2 : 1e-3);
    }
    expect_ones(format, 16000, 17.5f, levels ? 2e-2 : 1e-4);
  }
}

// Single tail terms are below half a unit of the sum they are added to, in f32 too.
TEST(AttentionEdge, ALongTailIsNotAbsorbed) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16})
    expect_ones(format, 65536, 17.4f, 5e-4, 1);
}

TEST(AttentionEdge, ASinkOfMinusInfinityIsNoSink) {
  Small s = random_small(KvFormat::f32, 9, 4);  // five queries see nothing
  const Small::Answer wanted = s.run();
  s.sink_logits = {-kInfinity};
  const Small::Answer got = s.run();
  EXPECT_EQ(got.out, wanted.out);
  EXPECT_EQ(got.lse, wanted.lse);
}

TEST(AttentionEdge, ASinkOfMinusInfinityIsNoSinkInAMerge) {
  const Device d = cpu_device();
  const Tensor partial = tensor_of(d, std::vector<float>{0, 0, -kInfinity, 0}, {1, 1, 1, 4});
  const Tensor out = d.tensor(DType::f32, {1, 1, 2}), lse = d.tensor(DType::f32, {1, 1});
  attention_merge(RunNow(d),
                  {partial, out, lse, tensor_of(d, std::vector<float>{-kInfinity}, {1})});
  EXPECT_EQ(floats_of(out), (std::vector<float>{0, 0}));
  EXPECT_EQ(floats_of(lse)[0], -kInfinity);
}

// A cap far above every logit changes nothing.
TEST(AttentionEdge, ALargeSoftCapIsNone) {
  for (const float cap : {1e3f, 1e4f, 1e6f, 1e30f}) {
    for (const uint64_t tokens : {1u, 40u}) {
      Small s = random_small(KvFormat::f32, tokens, 50);
      s.options.mask.causal = false;
      const Small::Answer wanted = s.run();
      s.options.mask.soft_cap = cap;
      const Small::Answer got = s.run();
      for (uint64_t i = 0; i < got.lse.size(); ++i)
        ASSERT_NEAR(got.lse[i], wanted.lse[i], 1e-4) << cap << " " << tokens;
      for (uint64_t i = 0; i < got.out.size(); ++i)
        ASSERT_NEAR(got.out[i], wanted.out[i], 1e-4) << cap << " " << tokens;
    }
  }
}

TEST(AttentionEdge, ATinySoftCapIsNotNaN) {
  Small s = random_small(KvFormat::f32, 1, 50);
  s.options.mask.soft_cap = 1e-39f;
  std::fill(s.q.begin(), s.q.end(), 0.0f);
  EXPECT_NEAR(s.run().lse[0], std::log(50.0), 1e-5);
}

// A NaN may carry a payload.
TEST(AttentionEdge, EveryNaNShows) {
  for (const uint32_t bits : {0x7FC00001u, 0xFFC00001u, 0x7FC00100u, 0x7F800001u, 0x7FFFFFFFu}) {
    for (const uint64_t tokens : {1u, 40u}) {
      for (const float cap : {0.0f, 5.0f}) {
        Small s = random_small(KvFormat::f32, tokens, 100);
        s.options.mask.causal = false;
        s.options.mask.soft_cap = cap;
        const auto nan = std::bit_cast<float>(bits);
        std::memcpy(&s.k[90 * s.dim], &nan, sizeof(nan));
        const Small::Answer answer = s.run();
        EXPECT_TRUE(std::isnan(answer.out[0]))
            << std::hex << bits << " " << tokens << " cap " << cap << " " << answer.out[0];
        EXPECT_TRUE(std::isnan(answer.lse[0])) << std::hex << bits << " " << answer.lse[0];
      }
    }
  }
}

TEST(AttentionEdge, TinyQueriesGiveTheMean) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::tq8, KvFormat::tq4}) {
    for (const float size : {1e-36f, 1e-39f, 1e-44f}) {
      Small s = random_small(format, 1, 50);
      for (float& x : s.q) x = x > 0 ? size : -size;
      const Small::Answer answer = s.run();
      EXPECT_NEAR(answer.lse[0], std::log(50.0), 1e-5) << name(format) << " " << size;
      for (const float x : answer.out) ASSERT_TRUE(std::isfinite(x)) << name(format) << " " << size;
    }
  }
}

TEST(AttentionEdge, TinyValuesKeepTheirWeights) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::tq8, KvFormat::tq4}) {
    for (const uint64_t tokens : {1u, 40u}) {
      Small s = random_small(format, tokens, 50);
      s.options.scale = 1;
      const Small::Answer wanted = s.run();
      for (float& x : s.v) x *= 0x1p-118f;  // 3e-36
      const Small::Answer got = s.run();
      for (uint64_t i = 0; i < got.out.size(); ++i)
        ASSERT_NEAR(got.out[i] * 0x1p118f, wanted.out[i], 2e-2) << name(format) << " " << tokens;
    }
  }
}

// Mean over three draws; the format has 0.87e-4 of it.
TEST(AttentionEdge, EightBitsKeepTheirBound) {
  double error = 0;
  for (const uint32_t seed : {1u, 2u, 3u}) {
    const AttentionProblem problem(cpu_device(), {.heads = 32,
                                                  .kv_heads = 8,
                                                  .length = 4096,
                                                  .k = KvFormat::tq8,
                                                  .v = KvFormat::tq8,
                                                  .seed = seed});
    const AttentionAnswer answer = problem.run();
    error += nmse(answer.out, answer.original.out) / 3;
  }
  EXPECT_LE(error, 1.2e-4);
}

}  // namespace
}  // namespace gyre::test
