// What callers of attention may rely on, whatever the numbers: threads and replays do not matter,
// what was computed apart can be merged, and results that are known without arithmetic come out.
#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(AttentionUse, TheNumberOfThreadsDoesNotMatter) {
  const AttentionCase cases[] = {
      {.heads = 8, .kv_heads = 2, .length = 5000, .k = KvFormat::tq8, .v = KvFormat::tq4},
      {.heads = 8, .kv_heads = 2, .length = 5000},
      {.tokens = 3,
       .heads = 3,
       .kv_heads = 3,
       .length = 2500,
       .k = KvFormat::f32,
       .alibi_slopes = true},
      {.tokens = 100,
       .heads = 6,
       .kv_heads = 3,
       .length = 300,
       .v = KvFormat::tq3,
       .sink_logits = true},
      {.tokens = 9,
       .heads = 5,
       .kv_heads = 1,
       .length = 400,
       .k = KvFormat::mlx_native4,
       .splits = 7},
  };
  for (const AttentionCase& c : cases) {
    std::vector<Bytes> first;
    for (const uint32_t threads : {1u, 2u, 3u, 8u}) {
      const AttentionProblem problem(cpu_device(threads), c);
      problem.record(RunNow(problem.device()));
      const std::vector<Bytes> got = {read_bytes(problem.inputs.out),
                                      read_bytes(problem.inputs.lse)};
      if (first.empty()) first = got;
      EXPECT_EQ(got, first) << problem.numbers().text() << " with " << threads << " threads";
    }
  }
}

// A replay reads the cache as it is then, not as it was when the call was recorded.
TEST(AttentionUse, AReplaySeesANewerCache) {
  const Device d = cpu_device();
  const std::vector<float> rows = gaussian_rows(40, 64, 3);
  const KvBuffer k = cache_of(d, KvFormat::f32, KvRole::k, rows, {1, 64});
  const KvBuffer v = cache_of(d, KvFormat::f32, KvRole::v, rows, {1, 64});
  const Tensor q = tensor_of(d, gaussian_rows(1, 64, 4), {1, 1, 64});
  const Tensor out = d.tensor(DType::f32, {1, 1, 64});
  Encoder encoder(d);
  attention(encoder, {.q = q, .k_cache = k, .v_cache = v, .out = out}, {.length = 40});
  const Graph graph = encoder.instantiate();
  graph.replay().wait();
  std::vector<float> once = floats_of(out), doubled = rows;
  for (float& x : doubled) x *= 2;
  v.codes.write_from(std::span<const float>(doubled));
  graph.replay().wait();
  for (float& x : once) x *= 2;
  EXPECT_EQ(floats_of(out), once);
}

// Two machines, each with its half of the keys.
TEST(AttentionUse, HalvesComputedApartMergeToTheWhole) {
  constexpr uint64_t kKeys = 300, kFirst = 117, kDim = 64, kHeads = 6, kKv = 2;
  for (const KvFormat format : kSomeFormats) {
    const Device d = cpu_device();
    const auto k = gaussian_rows(kKeys * kKv, kDim, 5), v = gaussian_rows(kKeys * kKv, kDim, 6);
    const Tensor q = tensor_of(d, gaussian_rows(kHeads, kDim, 7), {1, kHeads, kDim});
    const Tensor sink_logits = tensor_of(d, gaussian_rows(1, kHeads, 8), {kHeads});
    const Tensor partial = d.tensor(DType::f32, attention_partial_shape(5, q.shape(), kDim));
    Encoder encoder(d);
    const auto part = [&](const std::vector<float>& rows, bool second) {
      const auto middle = rows.begin() + static_cast<std::ptrdiff_t>(kFirst * kKv * kDim);
      return second ? std::vector<float>(middle, rows.end())
                    : std::vector<float>(rows.begin(), middle);
    };
    // Three splits of one half, two of the other, side by side in one tensor.
    for (const bool second : {false, true}) {
      attention_partial(encoder,
                        {.q = q,
                         .k_cache = cache_of(d, format, KvRole::k, part(k, second), {kKv, kDim}),
                         .v_cache = cache_of(d, format, KvRole::v, part(v, second), {kKv, kDim}),
                         .partial = partial.slice(0, second ? 3 : 0, second ? 2 : 3)},
                        {.length = second ? kKeys - kFirst : kFirst, .scale = 0.125f});
    }
    const Tensor merged = d.tensor(DType::f32, {1, kHeads, kDim});
    const Tensor merged_lse = d.tensor(DType::f32, {1, kHeads});
    attention_merge(encoder, {partial, merged, merged_lse, sink_logits});
    const Tensor out = d.tensor(DType::f32, {1, kHeads, kDim});
    const Tensor lse = d.tensor(DType::f32, {1, kHeads});
    attention(encoder,
              {.q = q,
               .k_cache = cache_of(d, format, KvRole::k, k, {kKv, kDim}),
               .v_cache = cache_of(d, format, KvRole::v, v, {kKv, kDim}),
               .out = out,
               .lse = lse},
              {.length = kKeys, .scale = 0.125f, .mask = {.sink_logits = sink_logits}});
    encoder.submit().wait();
    const auto a = floats_of(merged), b = floats_of(out);
    const auto a_lse = floats_of(merged_lse), b_lse = floats_of(lse);
    // f16 and levels round probabilities block by block, and the blocks differ.
    const bool exact = format == KvFormat::f32 || format == KvFormat::bf16;
    EXPECT_LE(nmse(a, b), exact ? 1e-11 : 2e-4) << name(format);
    for (uint64_t h = 0; h < kHeads; ++h) EXPECT_NEAR(a_lse[h], b_lse[h], 3e-6) << name(format);
  }
}

TEST(AttentionUse, MergingOneStateTwiceChangesNothing) {
  const Device d = cpu_device();
  const std::vector<float> state = {1, -2, 3, 4, 0.5f, 2};  // four coordinates, max, sum
  std::vector<float> twice = state;
  twice.insert(twice.end(), state.begin(), state.end());
  const Tensor out = d.tensor(DType::f32, {1, 1, 4}), lse = d.tensor(DType::f32, {1, 1});
  attention_merge(RunNow(d), {tensor_of(d, twice, {2, 1, 1, 6}), out, lse, {}});
  EXPECT_EQ(floats_of(out), (std::vector<float>{0.5f, -1, 1.5f, 2}));
  EXPECT_NEAR(floats_of(lse)[0], 0.5 + std::log(4.0), 1e-6);
}

TEST(AttentionUse, AnEmptyCacheGivesZeroAndMinusInfinity) {
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {1u, 5u, 40u}) {
      for (const uint64_t splits : {0u, 3u}) {
        const AttentionCase c{
            .tokens = tokens, .length = 0, .k = format, .v = format, .splits = splits};
        const AttentionAnswer answer = AttentionProblem(cpu_device(), c).run();
        for (const double x : answer.out) ASSERT_EQ(x, 0) << c.text();
        for (const double x : answer.lse) ASSERT_EQ(x, -kInfinity) << c.text();
      }
    }
  }
}

TEST(AttentionUse, AnEmptyCacheWithSinksGivesTheSink) {
  for (const uint64_t tokens : {1u, 40u}) {
    for (const uint64_t splits : {0u, 3u}) {
      const AttentionCase c{.tokens = tokens, .length = 0, .sink_logits = true, .splits = splits};
      const AttentionProblem problem(cpu_device(), c);
      const AttentionAnswer answer = problem.run();
      const std::vector<float> sink_logits = floats_of(problem.options.mask.sink_logits);
      for (const double x : answer.out) ASSERT_EQ(x, 0);
      for (size_t i = 0; i < answer.lse.size(); ++i)
        ASSERT_NEAR(answer.lse[i], sink_logits[i % sink_logits.size()],
                    3e-7 * std::fabs(sink_logits[i % 4]));
    }
  }
}

// Values that need no reference.

// Levels are exact for one row only up to the format; then the answer is what the cache holds.
std::vector<float> stored(KvFormat format, KvRole role, const std::vector<float>& row) {
  const Device d = cpu_device();
  return decoded(d, cache_of(d, format, role, row, {1, row.size()}));
}

TEST(AttentionUse, OneKeyReturnsItsValue) {
  for (const KvFormat format : kSomeFormats) {
    const Small s = random_small(format, 1, 1);
    const Small::Answer answer = s.run();
    const std::vector<float> value = stored(format, KvRole::v, s.v);
    for (uint64_t e = 0; e < s.dim; ++e) ASSERT_NEAR(answer.out[e], value[e], 2e-6) << name(format);
    double logit = 0;
    const std::vector<float> key = stored(format, KvRole::k, s.k);
    for (uint64_t e = 0; e < s.dim; ++e) logit += double{s.q[e]} * key[e] / 8;
    EXPECT_NEAR(answer.lse[0], logit, describe(format).bits >= 32 ? 1e-6 : 1e-3) << name(format);
  }
}

// Equal logits weigh all values alike: equal keys, a query of zeros, a scale of zero.
TEST(AttentionUse, EqualLogitsGiveTheMean) {
  constexpr uint64_t kKeys = 200;
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {1u, 40u}) {
      for (const int kind : {0, 1, 2}) {
        Small s = random_small(format, tokens, kKeys);
        s.options.mask.causal = false;
        if (kind == 0) {
          for (uint64_t i = s.dim; i < s.k.size(); ++i) s.k[i] = s.k[i - s.dim];
        } else if (kind == 1) {
          std::fill(s.q.begin(), s.q.end(), 0.0f);
        } else {
          s.options.scale = 0;
        }
        const Small::Answer answer = s.run();
        std::vector<double> mean(s.dim);
        for (uint64_t key = 0; key < kKeys; ++key) {
          const auto row = s.v.begin() + static_cast<std::ptrdiff_t>(key * s.dim);
          const std::vector<float> value = stored(format, KvRole::v, {row, row + 64});
          for (uint64_t e = 0; e < s.dim; ++e) mean[e] += value[e] / double{kKeys};
        }
        for (uint64_t i = 0; i < answer.out.size(); ++i) {
          // Bytes times a row's own scale are off by 1/510 of the largest.
          const double bound = describe(format).compressed ? 1e-3 : 1e-6;
          ASSERT_NEAR(answer.out[i], mean[i % s.dim], bound) << name(format) << " kind " << kind;
        }
        if (kind == 0) continue;
        EXPECT_NEAR(answer.lse[0], std::log(double{kKeys}), 1e-6) << name(format);
      }
    }
  }
}

// Powers of two only move exponents: products and values are as large as f32 and the formats allow.
TEST(AttentionUse, MagnitudesOnlyMoveExponents) {
  const float large = 0x1p100f;  // 1.3e30
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::tq8, KvFormat::tq4}) {
    for (const uint64_t tokens : {1u, 40u}) {
      const Small s = random_small(format, tokens, 80);
      const Small::Answer wanted = s.run();
      for (const float gain : {large, -large, 1 / large}) {
        Small other = s;
        for (float& x : other.q) x /= gain;
        for (float& x : other.k) x *= gain;
        const Small::Answer got = other.run();
        EXPECT_EQ(got.lse, wanted.lse) << name(format) << " k * " << gain << " " << tokens;
        EXPECT_EQ(got.out, wanted.out) << name(format) << " k * " << gain << " " << tokens;
        other = s;
        for (float& x : other.v) x *= gain / 16;
        Small::Answer scaled = wanted;
        for (float& x : scaled.out) x *= gain / 16;
        EXPECT_EQ(other.run().out, scaled.out) << name(format) << " v * " << gain << " " << tokens;
      }
    }
  }
}

// The largest logit wins by far: one value comes out, and nothing overflows on the way.
TEST(AttentionUse, HugeLogitsPickOneKey) {
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {1u, 40u}) {
      Small s = random_small(format, tokens, 80);
      s.options.mask.causal = false;
      for (uint64_t i = 0; i < s.q.size(); ++i) s.q[i] = s.k[33 * s.dim + i % s.dim];
      s.options.scale = 1e4f;
      const Small::Answer answer = s.run();
      const std::vector<float> value =
          stored(format, KvRole::v, {s.v.begin() + 33 * 64, s.v.begin() + 34 * 64});
      for (uint64_t i = 0; i < answer.out.size(); ++i)
        ASSERT_NEAR(answer.out[i], value[i % s.dim], 2e-6) << name(format);
      EXPECT_GT(answer.lse[0], 1e4f);
      EXPECT_TRUE(std::isfinite(answer.lse[0]));
    }
  }
}

// Compressed latents: V is the first part of what K holds, in the same memory.
TEST(AttentionUse, ValuesMayBeAPartOfTheKeys) {
  const Device d = cpu_device();
  const KvBuffer k = cache_of(d, KvFormat::f32, KvRole::k, gaussian_rows(50, 96, 1), {1, 96});
  const KvBuffer v{{KvFormat::f32, KvRole::v, 1, 50, 64}, k.codes.slice(2, 0, 64), {}};
  const KvBuffer copy = KvBuffer::allocate(d, v.shape);
  const Tensor q = tensor_of(d, gaussian_rows(4, 96, 2), {1, 4, 96});
  const Tensor out = d.tensor(DType::f32, {1, 4, 64}), other = d.tensor(DType::f32, {1, 4, 64});
  Encoder encoder(d);
  kv_copy(encoder, {.k = v.codes, .k_cache = copy.codes});
  const AttentionOptions options{.length = 50, .scale = 0.1f};
  attention(encoder, {.q = q, .k_cache = k, .v_cache = v, .out = out}, options);
  attention(encoder, {.q = q, .k_cache = k, .v_cache = copy, .out = other}, options);
  encoder.submit().wait();
  EXPECT_EQ(read_bytes(out), read_bytes(other));
}

// A dimension of one entry has no stride to speak of.
TEST(AttentionUse, StridesOfSingleEntriesDoNotMatter) {
  const Device d = cpu_device();
  const std::vector<float> rows = gaussian_rows(1, 64, 1);
  const KvBuffer k = cache_of(d, KvFormat::f32, KvRole::k, rows, {1, 64});
  const KvBuffer v = cache_of(d, KvFormat::f32, KvRole::v, rows, {1, 64});
  constexpr uint64_t kFar = uint64_t{1} << 63;
  const Dims one{1, 1, 64}, far{kFar, kFar + 8, 1};
  KvBuffer far_k = k, far_v = v;
  far_k.codes = k.codes.strided(one, far);
  far_v.codes = v.codes.strided(one, far);
  const Tensor q = tensor_of(d, rows, one).strided(one, far);
  const Tensor out = d.tensor(DType::f32, one).strided(one, far);
  attention(RunNow(d), {.q = q, .k_cache = far_k, .v_cache = far_v, .out = out}, {.length = 1});
  EXPECT_EQ(read_bytes(out), read_bytes(v.codes));
}

TEST(AttentionUse, SupportsSaysWhatRuns) {
  Device d = cpu_device();
  for (const KvFormat k : kSomeFormats) {
    for (const KvFormat v : kSomeFormats)
      EXPECT_TRUE(supports(d, AttentionTypes{DType::bf16, k, v, DType::f16}));
  }
  EXPECT_FALSE(supports(d, AttentionTypes{DType::u8, KvFormat::f16, KvFormat::f16, DType::f32}));
  EXPECT_FALSE(supports(d, AttentionTypes{DType::f32, KvFormat::f16, KvFormat::f16, DType::i32}));
  EXPECT_FALSE(
      supports(d, AttentionTypes{DType::f32, static_cast<KvFormat>(3), KvFormat::f16, DType::f32}));
  const Device other = std::move(d);
  // NOLINTNEXTLINE(bugprone-use-after-move): that is the question
  EXPECT_REFUSED(("supports"),
                 supports(d, AttentionTypes{DType::f32, KvFormat::f16, KvFormat::f16, DType::f32}));
}

}  // namespace
}  // namespace gyre::test
