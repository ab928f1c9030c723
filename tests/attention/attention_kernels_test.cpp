// Every set of inner loops this machine can run gives attention within the same bounds.
#include <bit>

#include "attention/attention_fixture.h"
#include "attention/attention_op_case.h"
#include "attention/attention_small.h"
#include "cpu/attention/isa/kernels.h"
#include "format_classes.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

class AttentionKernelSets : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override { cpu::use_attention_kernels(cpu::attention_kernel_sets()[GetParam()]); }
  void TearDown() override { cpu::use_attention_kernels(cpu::attention_kernel_sets()[0]); }

  static void expect_near(const AttentionCase& c) {
    EXPECT_TRUE(attention_holds(Device::open("cpu", {.threads = 2}), c));
  }
  static void expect_near(KvFormat format, AttentionCase c) {
    c.k = c.v = format;
    expect_near(c);
  }
  // A ring with all that scores may have.
  static void expect_everything(uint64_t tokens, KvFormat format) {
    expect_near(format, {.tokens = tokens,
                         .heads = 8,
                         .kv_heads = 2,
                         .length = 200,
                         .capacity = 211,
                         .ring_start = 150,
                         .window = 70,
                         .soft_cap = 20,
                         .sink_logits = true,
                         .alibi_slopes = true});
  }
};

TEST_P(AttentionKernelSets, EveryFormatOddShapesAndRows) {
  for (const KvFormat format : kv_formats()) {
    for (const uint64_t dim : {64, 80, 96, 128, 192, 256, 576}) {
      if (!stores(format, dim)) continue;
      for (const uint64_t heads : {1, 2, 3, 4, 7, 16})
        expect_near(format, {.heads = heads, .k_dim = dim, .length = 77});
    }
    for (const uint64_t dim : {72, 88, 104, 112, 120, 136, 160}) {
      if (!stores(format, dim)) continue;
      for (const uint64_t heads : {1, 4, 7})
        expect_near(format, {.heads = heads, .k_dim = dim, .length = 77});
    }
  }
}

// Dims that are packed, and others; one row, a token's, and more than a kernel takes at a time.
TEST_P(AttentionKernelSets, Latents) {
  const Device device = Device::open("cpu", {.threads = 2});
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq2, KvFormat::tq3,
                                KvFormat::tq4, KvFormat::tq5, KvFormat::tq6, KvFormat::tq8}) {
    for (const uint64_t dim : {80u, 128u, 384u, 496u}) {
      for (const uint64_t heads : {1u, 7u, 70u}) {
        AttentionOpCase c{.k = format, .v = heads == 7 ? KvFormat::bf16 : KvFormat::tq8};
        c.tokens = heads == 7 ? 3 : 1;
        c.heads = heads;
        c.kv_heads = 1;
        c.k_dim = dim;
        c.v_dim = 16;
        c.length = 131;
        c.capacity = 140;
        c.window = heads == 7 ? 90 : 0;
        c.commands = {};
        c.latent = true;
        c.name = "latent " + std::to_string(dim) + " heads " + std::to_string(heads);
        EXPECT_TRUE(check_case(device, make_case(c))) << c.name;
      }
    }
  }
}

TEST_P(AttentionKernelSets, MasksRingsAndSharpQueries) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq8, KvFormat::tq4,
                                KvFormat::tq3, KvFormat::tq6}) {
    expect_everything(3, format);
    expect_near(format, {.tokens = 4, .length = 131, .tree_mask = true});
    expect_near(format, {.heads = 4, .length = 1000, .q_gain = 8});
  }
}

// 16-bit caches of many keys, mild and sharp queries: far below the 1e-5 that they may lose.
TEST_P(AttentionKernelSets, LongCachesOfSixteenBits) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16}) {
    for (const float gain : {1.0f, 8.0f}) {
      expect_near(format,
                  {.heads = 2, .kv_heads = 1, .k_dim = 128, .length = 65536, .q_gain = gain});
    }
  }
}

TEST_P(AttentionKernelSets, ThreadsDoNotChangeBits) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq8, KvFormat::tq3}) {
    for (const uint64_t tokens : {1, 150}) {
      std::vector<double> one;
      for (const uint32_t threads : {1u, 2u, 3u, 8u}) {
        const AttentionProblem problem(Device::open("cpu", {.threads = threads}), {.tokens = tokens,
                                                                                   .heads = 8,
                                                                                   .kv_heads = 2,
                                                                                   .length = 3000,
                                                                                   .k = format,
                                                                                   .v = format});
        problem.record(RunNow(problem.device()));
        const std::vector<double> out = problem.doubles_of(problem.inputs.out);
        if (one.empty()) one = out;
        EXPECT_EQ(out, one) << name(format) << ", " << tokens << " tokens, " << threads;
      }
    }
  }
}

// More rows than decoding takes: some sets have other kernels for them.
TEST_P(AttentionKernelSets, PromptsOfEveryFormatOddShapes) {
  for (const KvFormat format : kv_formats()) {
    for (const uint64_t dim : {64, 72, 80, 96, 112, 128, 160, 192, 256, 576}) {
      if (!stores(format, dim)) continue;
      // Rows of one and several tiles, the last of them not full.
      for (const uint64_t tokens : {5, 9, 17})
        expect_near(format, {.tokens = tokens, .k_dim = dim, .length = 77});
    }
    if (stores(format, 256))
      expect_near(format, {.tokens = 50, .heads = 3, .k_dim = 256, .length = 150});
  }
  for (const KvFormat k : {KvFormat::f16, KvFormat::bf16, KvFormat::tq4, KvFormat::f32}) {
    for (const KvFormat v : {KvFormat::f16, KvFormat::bf16, KvFormat::tq8, KvFormat::f32})
      expect_near({.tokens = 6, .k_dim = 192, .v_dim = 128, .length = 140, .k = k, .v = v});
  }
}

TEST_P(AttentionKernelSets, PromptsWithMasksRingsAndSharpQueries) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq8, KvFormat::tq4}) {
    expect_everything(21, format);
    expect_near(format, {.tokens = 20, .length = 131, .tree_mask = true});
    for (const float gain : {1.0f, 8.0f})
      expect_near(format, {.tokens = 20, .length = 1000, .q_gain = gain});
  }
}

// One key that all rows look at sets the step of every weight; the others carry the answer.
TEST_P(AttentionKernelSets, PromptsBesideALoudKey) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16}) {
    Small s = random_small(format, 24, 500);
    for (uint64_t c = 0; c < s.dim; ++c) s.k[c] = s.v[c] = 0;
    for (uint64_t t = 0; t < 24; ++t) s.q[t * s.dim] = 8;
    s.k[0] = 9;  // a logit of 9, weight about 16 of 500 others'
    const Small::Answer got = s.run();
    s.format = KvFormat::f32;
    cpu::use_attention_kernels(cpu::attention_kernel_sets().back());
    // Rows in f32 hold what the 16 bits hold.
    for (std::vector<float>* rows : {&s.k, &s.v}) {
      const Device d = test_device();
      *rows = decoded(d, cache_of(d, format, KvRole::k, *rows, {1, s.dim}));
    }
    const Small::Answer wanted = s.run();
    EXPECT_LE(nmse(got.out, wanted.out), 6e-6) << name(format);
  }
}

// A prompt's bits do not depend on how it is cut, nor on the rows beside one.
TEST_P(AttentionKernelSets, APromptInPiecesIsTheSame) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq4}) {
    constexpr uint64_t kTokens = 150, kBefore = 270, kCut = 61;
    Small whole = random_small(format, kTokens, kBefore + kTokens);
    whole.v[100 * whole.dim + 3] = std::numeric_limits<float>::infinity();
    const Small::Answer all = whole.run();
    Small first = whole, second = whole;
    first.q.resize(kCut * whole.dim);
    first.k.resize((kBefore + kCut) * whole.dim);
    first.v.resize((kBefore + kCut) * whole.dim);
    second.q.erase(second.q.begin(), second.q.begin() + kCut * whole.dim);
    std::vector<float> joined = first.run().out;
    const std::vector<float> rest = second.run().out;
    joined.insert(joined.end(), rest.begin(), rest.end());
    for (size_t i = 0; i < joined.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(joined[i]), std::bit_cast<uint32_t>(all.out[i]))
          << name(format) << " at " << i / whole.dim << ", " << i % whole.dim;
  }
}

// So many rows that some sets take more of them at a time: the same bits as of few, whatever
// differs from row to row.
TEST_P(AttentionKernelSets, ManyRowsGiveTheBitsOfFew) {
  constexpr uint64_t kTokens = 130, kLast = 10, kHeads = 128, kDim = 64, kKeys = 300;
  const Device d = test_device();
  const std::vector<float> q = gaussian_rows(kTokens * kHeads, kDim, 1);
  std::vector<float> alibi_slopes(kHeads);
  for (uint64_t head = 0; head < kHeads; ++head)
    alibi_slopes[head] = 0.001f * static_cast<float>(head + 1);
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq4}) {
    AttentionInputs in;
    in.k_cache = cache_of(d, format, KvRole::k, gaussian_rows(kKeys, kDim, 2), {1, kDim});
    in.v_cache = cache_of(d, format, KvRole::v, gaussian_rows(kKeys, kDim, 3), {1, kDim});
    AttentionOptions options{.length = kKeys, .scale = 1 / 8.0f};
    bool tree_mask = false;
    const auto run = [&](uint64_t tokens) {  // the last of them
      in.q = tensor_of(d, {q.end() - static_cast<int64_t>(tokens * kHeads * kDim), q.end()},
                       {tokens, kHeads, kDim});
      in.out = d.tensor(DType::f32, {tokens, kHeads, kDim});
      if (tree_mask) {
        // A token does not see those that are three, six and so on before it; none misses older
        // ones.
        std::vector<uint8_t> sees(tokens * tokens);
        for (uint64_t t = 0; t < tokens; ++t) {
          for (uint64_t other = 0; other <= t; ++other)
            sees[t * tokens + other] = other == t || tokens - other > kLast || (t - other) % 3 != 0;
        }
        options.mask.tree_mask = tensor_of(d, sees, {tokens, tokens});
      }
      attention(RunNow(d), in, options);
      std::vector<float> out = floats_of(in.out);
      out.erase(out.begin(), out.end() - static_cast<int64_t>(kLast * kHeads * kDim));
      return out;
    };
    EXPECT_EQ(run(kTokens), run(kLast)) << name(format);
    tree_mask = true;
    EXPECT_EQ(run(kTokens), run(kLast)) << name(format) << ", a tree_mask";
    tree_mask = false;
    options.mask.tree_mask = {};
    options.mask.window = 50;
    options.mask.soft_cap = 20;
    options.mask.alibi_slopes = tensor_of(d, alibi_slopes, {kHeads});
    EXPECT_EQ(run(kTokens), run(kLast)) << name(format) << ", window, soft cap and alibi_slopes";
  }
}

// Linux may refuse AMX's tiles: then everything but that set is there, and nothing else is where a
// processor has none.
TEST(AttentionKernels, WithoutTilesTheOtherSetsAreLeft) {
  std::vector<std::string> granted, refused;
  for (const auto& set : cpu::find_attention_kernel_sets([] { return true; }))
    granted.emplace_back(set.name);
  for (const auto& set : cpu::find_attention_kernel_sets([] { return false; }))
    refused.emplace_back(set.name);
  EXPECT_EQ(std::ranges::count(refused, "amx"), 0);
  EXPECT_EQ(refused.back(), "portable");
  std::erase(granted, "amx");
  EXPECT_EQ(granted, refused);
}

// Sums over levels are integers: sets that round queries and weights alike give the same bits,
// however many rows there are.
TEST(AttentionKernels, SetsOfAvx512GiveTheSameBits) {
  const auto find = [](std::string_view wanted) -> const cpu::AttentionKernels* {
    for (const cpu::AttentionKernels& set : cpu::attention_kernel_sets()) {
      if (set.name == wanted) return &set;
    }
    return nullptr;
  };
  const cpu::AttentionKernels* const vnni = find("avx512vnni");
  if (find("avx512vbmi") == nullptr) GTEST_SKIP() << "this machine has neither AMX nor VBMI";
  for (const KvFormat format : kv_formats()) {
    if (describe(format).scale != KvScaleKind::u8e8) continue;
    // At dims 88 to 120 and 208 a scale block ends within a group of 64 coordinates.
    for (const uint64_t dim : {64, 72, 80, 88, 96, 112, 120, 128, 144, 192, 208, 320}) {
      for (const uint64_t tokens : {1, 3, 4, 8, 9, 16, 20, 40, 70, 150}) {
        Small s = random_small(format, tokens, 150);
        s.dim = dim;
        s.q.resize(tokens * dim, 0.25f);
        s.k.resize(150 * dim, 0.5f);
        s.v.resize(150 * dim, -1.0f);
        cpu::use_attention_kernels(*vnni);
        const Small::Answer wanted = s.run();
        for (const char* set : {"amx", "avx512vbmi"}) {
          if (find(set) == nullptr) continue;
          cpu::use_attention_kernels(*find(set));
          EXPECT_EQ(s.run().out, wanted.out)
              << set << " " << name(format) << " " << dim << " " << tokens;
        }
      }
    }
  }
  cpu::use_attention_kernels(cpu::attention_kernel_sets()[0]);
}

enum class Kind : uint8_t { finite, infinity, minus_infinity, nan };
Kind kind_of(float x) {
  if (std::isnan(x)) return Kind::nan;
  if (std::isfinite(x)) return Kind::finite;
  return x > 0 ? Kind::infinity : Kind::minus_infinity;
}

// Some kernels take a query or a probability apart: an infinity then meets parts that are 0, or of
// the other sign.
TEST_P(AttentionKernelSets, WhatIsNotFiniteShowsAsInF32) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto payload = std::bit_cast<float>(0x7F800001u);  // lost if only the upper half is kept
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16}) {
    for (const uint64_t tokens : {1, 2, 4, 18}) {
      // Splits into two numbers of one sign, of both, into one alone, and what must not overflow.
      for (const float q : {1 + 0x1p-9f, 1 + 0x1p-7f - 0x1p-9f, 1.0f, -1 - 0x1p-9f, 0.0f, kMax,
                            kInfinity, -kInfinity, payload}) {
        for (const float k : {0.0f, 0x1p-10f, kInfinity, -kInfinity, payload}) {
          for (const float v : {1.0f, kInfinity, -kInfinity, payload}) {
            Small s = random_small(format, tokens, 71);
            s.options.mask.causal = false;
            for (uint64_t t = 0; t < tokens; ++t) s.q[t * s.dim + 9] = q;
            s.k[30 * s.dim + 9] = k;
            s.v[68 * s.dim + 5] = v;  // the first of a last group that is not full
            const Small::Answer got = s.run();
            s.format = KvFormat::f32;
            cpu::use_attention_kernels(cpu::attention_kernel_sets().back());
            const Small::Answer wanted = s.run();
            cpu::use_attention_kernels(cpu::attention_kernel_sets()[GetParam()]);
            for (size_t i = 0; i < got.out.size(); ++i)
              EXPECT_EQ(kind_of(got.out[i]), kind_of(wanted.out[i]))
                  << name(format) << " q " << q << " k " << k << " v " << v << " at " << i << ": "
                  << got.out[i];
            EXPECT_EQ(kind_of(got.lse[0]), kind_of(wanted.lse[0])) << q << " " << k;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionKernelSets,
                         testing::Range<size_t>(0, cpu::attention_kernel_sets().size()),
                         [](const auto& set) {
                           return std::string(cpu::attention_kernel_sets()[set.param].name);
                         });

}  // namespace
}  // namespace gyre::test
