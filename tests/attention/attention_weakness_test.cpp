// The reference library's weaknesses in its attention functions (section 7.4 of the specification,
// items 31 to 40), each as the situation in which it goes wrong and what Gyre does there. Each test
// opens with what the reference did.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "expect_error.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Memory whose end is the end of what may be read: one byte more is a fault.
class EdgeMemory {
 public:
  explicit EdgeMemory(const Tensor& contents) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inside = (contents.bytes() + page - 1) / page * page;
    size_ = inside + page;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    if (mprotect(bytes() + inside, page, PROT_NONE) != 0) throw std::bad_alloc();
    start_ = bytes() + inside - contents.bytes();
    const Bytes copied = read_bytes(contents);
    std::memcpy(start_, copied.data(), copied.size());
  }
  EdgeMemory(const EdgeMemory&) = delete;
  EdgeMemory& operator=(const EdgeMemory&) = delete;
  ~EdgeMemory() { munmap(base_, size_); }

  Tensor view(const Device& device, const Tensor& like) const {
    return device.wrap(static_cast<const void*>(start_), like.dtype(), like.shape());
  }

 private:
  std::byte* bytes() const { return static_cast<std::byte*>(base_); }

  void* base_ = nullptr;
  std::byte* start_ = nullptr;
  size_t size_ = 0;
};

// Reference: dense kernels read K and V to the end of the last 32 slots: past the valid ones, whose
// NaN then showed, and for the last head past the buffer.
TEST(AttentionWeakness, W31_NothingIsReadPastTheKeys) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq8,
                                KvFormat::tq3, KvFormat::mlx_native4}) {
    for (const uint64_t length : {1u, 31u, 33u, 70u}) {
      for (const uint64_t tokens : {1u, 30u}) {
        for (const uint64_t spare : {0u, 3u}) {  // slots of NaN
          const AttentionCase c{.tokens = tokens,
                                .heads = 4,
                                .kv_heads = 2,
                                .k_dim = 64,
                                .length = length,
                                .capacity = length + spare,
                                .k = format,
                                .v = format};
          AttentionProblem problem(cpu_device(), c);
          std::vector<std::unique_ptr<EdgeMemory>> memory;
          for (Tensor* tensor : {&problem.inputs.k_cache.codes, &problem.inputs.k_cache.scales,
                                 &problem.inputs.v_cache.codes, &problem.inputs.v_cache.scales}) {
            if (!tensor->defined()) continue;
            memory.push_back(std::make_unique<EdgeMemory>(*tensor));
            *tensor = memory.back()->view(problem.device(), *tensor);
          }
          const AttentionAnswer answer = problem.run();
          EXPECT_LE(nmse(answer.out, answer.decoded.out),
                    tolerance_of(problem.device(), answer.first, c).nmse)
              << c.text();
        }
      }
    }
  }
}

// Queries with logits 0 over values that count keys: the mean and the sum name the range of keys
// that was seen.
struct Seen {
  double first, last;
};

Seen seen_keys(float mean, float lse) {
  const double count = std::round(std::exp(double{lse}));
  return {mean - (count - 1) / 2, mean + (count - 1) / 2};
}

Small counting(uint64_t tokens, uint64_t keys) {
  Small s{.format = KvFormat::f32};
  s.q.assign(tokens * s.dim, 0.0f);
  s.k = gaussian_rows(keys, s.dim, 1);
  for (uint64_t key = 0; key < keys; ++key) s.v.insert(s.v.end(), s.dim, static_cast<float>(key));
  return s;
}

void expect_ranges(const Small& s, Seen (*wanted)(int64_t own, const Small&)) {
  const Small::Answer answer = s.run();
  const auto tokens = static_cast<int64_t>(s.q.size() / s.dim);
  const auto keys = static_cast<int64_t>(s.k.size() / s.dim);
  for (int64_t t = 0; t < tokens; ++t) {
    const Seen got = seen_keys(answer.out[static_cast<uint64_t>(t) * s.dim],
                               answer.lse[static_cast<uint64_t>(t)]);
    const Seen range = wanted(keys - tokens + t, s);
    ASSERT_NEAR(got.first, range.first, 1e-2) << "query " << t << " of " << tokens;
    ASSERT_NEAR(got.last, range.last, 1e-2) << "query " << t << " of " << tokens;
  }
}

Seen up_to_own(int64_t own, const Small&) { return {0, static_cast<double>(own)}; }

// Reference: the causal test was applied to the last two key tiles only; resuming a prefill at an
// offset that is not a multiple of 16 leaked future keys.
TEST(AttentionWeakness, W32_AResumedPrefillSeesNoFutureKeys) {
  expect_ranges(counting(56, 64), up_to_own);
  expect_ranges(counting(1048, 2048), up_to_own);
  for (const uint64_t offset : {1u, 15u, 17u, 65u})
    expect_ranges(counting(90, 90 + offset), up_to_own);
}

// In pieces or at once: the same bits where the arithmetic is the same, f32 otherwise.
TEST(AttentionWeakness, W32_PiecesOfAPrefillEqualTheWhole) {
  const Small whole = random_small(KvFormat::f32, 100, 100);
  const Small::Answer wanted = whole.run();
  for (const uint64_t first : {8u, 32u, 57u}) {
    Small rest = whole;
    rest.q.erase(rest.q.begin(), rest.q.begin() + static_cast<std::ptrdiff_t>(first * whole.dim));
    const Small::Answer got = rest.run();
    for (uint64_t i = 0; i < got.out.size(); ++i)
      ASSERT_NEAR(got.out[i], wanted.out[first * whole.dim + i], 2e-6) << first;
  }
}

// Reference: softcap was a parameter that nothing read.
TEST(AttentionWeakness, W33_TheSoftCapIsApplied) {
  for (const uint64_t tokens : {1u, 40u}) {
    Small s{.format = KvFormat::f32};
    s.q.assign(tokens * s.dim, 0.0f);
    for (uint64_t t = 0; t < tokens; ++t) s.q[t * s.dim] = 1;
    s.k.assign(2 * s.dim, 0.0f);
    s.k[0] = 30;  // logits 30 and 0
    s.v.assign(2 * s.dim, 0.0f);
    std::fill_n(s.v.begin(), s.dim, 1.0f);
    s.options.mask.causal = false;
    for (const float cap : {0.0f, 1.0f, 20.0f, 50.0f}) {
      s.options.mask.soft_cap = cap;
      const double logit = cap == 0 ? 30 : cap * std::tanh(30 / double{cap});
      const Small::Answer answer = s.run();
      EXPECT_NEAR(answer.out[0], 1 / (1 + std::exp(-logit)), 1e-6) << cap;
      EXPECT_NEAR(answer.lse[0], std::log1p(std::exp(logit)), 3e-5) << cap;
    }
  }
}

// Reference: queries were rounded to f16, which loses digits and overflows above 65504.
TEST(AttentionWeakness, W34_QueriesKeepTheirRangeAndDigits) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16}) {
    for (const uint64_t tokens : {1u, 40u}) {
      Small s{.format = format};
      s.q.assign(tokens * s.dim, 0.0f);
      for (uint64_t t = 0; t < tokens; ++t) s.q[t * s.dim] = 1 + 0x1p-12f;
      s.k.assign(s.dim, 0.0f);
      s.k[0] = 4096;
      s.v.assign(s.dim, 1.0f);
      s.options.mask.causal = false;
      EXPECT_NEAR(s.run().lse[0], 4097, 1e-3) << name(format);
    }
  }
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq8}) {
    Small s = random_small(format, 1, 50);
    const Small::Answer wanted = s.run();
    for (float& x : s.q) x *= 0x1p20f;
    s.options.scale = *s.options.scale * 0x1p-20f;
    EXPECT_EQ(s.run().out, wanted.out) << name(format);
  }
}

// Reference: a masked position had 65504 subtracted, so keys with lower scores lost to masked ones.
TEST(AttentionWeakness, W34_MaskedIsLowerThanAnyScore) {
  for (const uint64_t tokens : {3u, 40u}) {
    Small s = random_small(KvFormat::f32, tokens, 60);
    const uint64_t newest = 59;
    for (uint64_t t = 0; t < tokens; ++t) {
      for (uint64_t e = 0; e < s.dim; ++e) s.q[t * s.dim + e] = e == 0 ? 1.0f : 0.0f;
    }
    // The newest key has the best score by far; only the last query may see it.
    for (uint64_t key = 0; key < 60; ++key) s.k[key * s.dim] = key == newest ? 0.0f : -1e6f;
    s.options.scale = 1;
    const Small::Answer answer = s.run();
    EXPECT_NEAR(answer.lse[tokens - 1], 0, 1e-6);
    EXPECT_NEAR(answer.lse[tokens - 2], -1e6, 5);
    for (uint64_t e = 0; e < s.dim; ++e) {
      EXPECT_NEAR(answer.out[(tokens - 1) * s.dim + e], s.v[newest * s.dim + e], 1e-6);
      EXPECT_GT(std::fabs(answer.out[(tokens - 2) * s.dim + e] - s.v[newest * s.dim + e]), 1e-6);
    }
  }
}

// Reference: sizes and dtypes were taken on trust: V as K, bf16 as f32, ring starts past the end.
TEST(AttentionWeakness, W35_SizesDtypesAndRingsAreChecked) {
  const Device d = cpu_device();
  AttentionProblem problem(d, {.k_dim = 64, .length = 20, .capacity = 24});
  AttentionInputs in = problem.inputs;
  AttentionOptions options = problem.options;
  const auto call = [&] {
    Encoder encoder(d);
    attention(encoder, in, options);
  };
  in.k_cache.shape.format = KvFormat::f32;
  EXPECT_TRUE(refused({"k_cache must be f32", "got f16"}, call));
  in = problem.inputs;
  in.v_cache.shape.format = KvFormat::bf16;
  EXPECT_TRUE(refused({"v_cache must be bf16", "got f16"}, call));
  in = problem.inputs;
  in.out = d.tensor(DType::f32, {1, 4, 32});
  EXPECT_TRUE(refused({"out must have shape [1, 4, 64]"}, call));
  in = problem.inputs;
  options.ring_start = 24;
  EXPECT_TRUE(refused({"ring_start", "24"}, call));
  // A ring that is not full may start anywhere, and V need not have K's format.
  for (const uint64_t start : {0u, 3u, 23u}) {
    EXPECT_TRUE(attention_holds(d, {.k_dim = 64,
                                    .length = 20,
                                    .capacity = 24,
                                    .ring_start = start,
                                    .k = KvFormat::f32,
                                    .v = KvFormat::bf16,
                                    .window = 7}));
  }
}

// Reference: the dense form had no ring start: a window in a ring that has wrapped took the wrong
// slots.
TEST(AttentionWeakness, W36_DenseRingsHaveWindows) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    for (uint64_t start = 0; start < 40; ++start) {
      EXPECT_TRUE(attention_holds(cpu_device(), {.tokens = 2,
                                                 .k_dim = 32,
                                                 .length = 40,
                                                 .capacity = 40,
                                                 .ring_start = start,
                                                 .k = format,
                                                 .v = format,
                                                 .window = 11}));
    }
  }
}

// Reference: head dims 256 and 512 only, one query, no sink_logits, no bias, and always 32 groups
// and a second pass, however few keys.
TEST(AttentionWeakness, W37_EveryShapeAndNoMorePassesThanNeeded) {
  for (const uint64_t dim : {64u, 96u, 128u, 256u, 512u}) {
    for (const uint64_t group : {1u, 3u, 8u}) {
      EXPECT_TRUE(attention_holds(cpu_device(), {.tokens = 3,
                                                 .heads = 2 * group,
                                                 .kv_heads = 2,
                                                 .k_dim = dim,
                                                 .length = 32,
                                                 .sink_logits = true,
                                                 .alibi_slopes = true}));
    }
  }
  const auto commands = [](const AttentionCase& c) {
    const AttentionProblem problem(cpu_device(), c);
    Encoder encoder(problem.device());
    problem.record(encoder);
    return encoder.size();
  };
  EXPECT_EQ(commands({.length = 32}), 1u);
  EXPECT_EQ(commands({.heads = 64, .kv_heads = 64, .length = 4096}), 1u);  // heads are work enough
  EXPECT_EQ(commands({.tokens = 1100, .length = 1100, .k = KvFormat::tq4}), 1u);  // so are queries
  EXPECT_EQ(commands({.heads = 1, .kv_heads = 1, .length = 4096}), 1u);  // the kernel merges
  EXPECT_EQ(commands({.heads = 1, .kv_heads = 1, .length = 4096, .window = 512}), 1u);
}

Seen in_window(int64_t own, const Small& s) {
  return {static_cast<double>(
              std::max<int64_t>(0, own + 1 - static_cast<int64_t>(s.options.mask.window))),
          static_cast<double>(own)};
}

// Reference: a window of W was W keys in one function and W + 1 in another, and causal was aligned
// at the last key here and at the first there.
TEST(AttentionWeakness, W38_OneWindowAndOneAlignment) {
  for (const uint64_t tokens : {1u, 2u, 7u, 33u, 100u}) {
    expect_ranges(counting(tokens, 100), up_to_own);
    for (const uint64_t window : {1u, 2u, 16u, 17u, 99u, 100u, 1000u}) {
      Small s = counting(tokens, 100);
      s.options.mask.window = window;
      expect_ranges(s, in_window);
    }
  }
}

// Reference: prefill rounded scale * log2(e) to bf16, 0.18 % of every logit, and the query again.
TEST(AttentionWeakness, W39_TheScaleIsNotRounded) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::f16}) {
    for (const uint64_t tokens : {1u, 64u}) {
      for (const float scale : {1 / 16.0f, 0.0884f, 1 / 3.0f}) {
        Small s{.format = format, .dim = 256};
        s.q.assign(tokens * s.dim, 1.0f);
        s.k.assign(s.dim, 1.0f);
        s.v.assign(s.dim, 1.0f);
        s.options = {.scale = scale, .mask = {.causal = false}};
        const double logit = 256 * double{scale};
        EXPECT_NEAR(s.run().lse[0], logit, logit * 2.5e-7) << name(format) << " " << scale;
      }
    }
  }
}

// Reference: more queries than keys wrapped around to a huge bound; head dims past 512 overflowed
// private arrays; heads that do not divide and too long lengths were not noticed.
TEST(AttentionWeakness, W40_MoreQueriesThanKeysAndLargeHeads) {
  for (const uint64_t tokens : {9u, 60u}) {
    const Small s = random_small(KvFormat::f16, tokens, 4);
    const Small::Answer answer = s.run();
    for (uint64_t t = 0; t + 4 < tokens; ++t) {
      EXPECT_EQ(answer.lse[t], -kInfinity);
      for (uint64_t e = 0; e < s.dim; ++e) EXPECT_EQ(answer.out[t * s.dim + e], 0);
    }
    EXPECT_TRUE(std::isfinite(answer.lse[tokens - 4]));
  }
  for (const uint64_t dim : {520u, 768u, 1024u}) {
    for (const uint64_t tokens : {1u, 20u}) {
      EXPECT_TRUE(attention_holds(cpu_device(), {.tokens = tokens, .k_dim = dim, .length = 40}));
    }
  }
  const Device d = cpu_device();
  AttentionProblem problem(d, {.heads = 4, .kv_heads = 2, .k_dim = 64, .length = 20});
  const auto call = [&] {
    Encoder encoder(d);
    attention(encoder, problem.inputs, problem.options);
  };
  problem.options.length = 26;
  EXPECT_TRUE(refused({"length must be at most the capacity 25", "26"}, call));
  problem.options.length = 20;
  problem.inputs.q = problem.inputs.q.slice(1, 0, 3);
  EXPECT_TRUE(refused({"heads must be a multiple of kv_heads 2", "3"}, call));
}

}  // namespace
}  // namespace gyre::test
