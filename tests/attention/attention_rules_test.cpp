// Rules that are visible in single numbers: which memory is read, which keys a query sees, and
// which digits of queries, scales and logits count.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "gyre_test.h"
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

// Kernels read keys by groups: nothing behind the valid slots, and for the last head nothing behind
// the buffer.
TEST(AttentionRules, NothingIsReadPastTheKeys) {
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

// A prefill may resume at any offset, whatever tiles the kernel has.
TEST(AttentionRules, AResumedPrefillSeesNoFutureKeys) {
  expect_ranges(counting(56, 64), up_to_own);
  expect_ranges(counting(1048, 2048), up_to_own);
  for (const uint64_t offset : {1u, 15u, 17u, 65u})
    expect_ranges(counting(90, 90 + offset), up_to_own);
}

// In pieces or at once: the same bits where the arithmetic is the same, f32 otherwise.
TEST(AttentionRules, PiecesOfAPrefillEqualTheWhole) {
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

TEST(AttentionRules, TheSoftCapIsApplied) {
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

// In 16 bits a query would lose digits, and overflow above 65504.
TEST(AttentionRules, QueriesKeepTheirRangeAndDigits) {
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

// A large constant in place of minus infinity would let masked keys win over low scores.
TEST(AttentionRules, MaskedIsLowerThanAnyScore) {
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

Seen in_window(int64_t own, const Small& s) {
  return {static_cast<double>(
              std::max<int64_t>(0, own + 1 - static_cast<int64_t>(s.options.mask.window))),
          static_cast<double>(own)};
}

// A window of W is W keys, the query's own included; queries are aligned with the newest keys.
TEST(AttentionRules, OneWindowAndOneAlignment) {
  for (const uint64_t tokens : {1u, 2u, 7u, 33u, 100u}) {
    expect_ranges(counting(tokens, 100), up_to_own);
    for (const uint64_t window : {1u, 2u, 16u, 17u, 99u, 100u, 1000u}) {
      Small s = counting(tokens, 100);
      s.options.mask.window = window;
      expect_ranges(s, in_window);
    }
  }
}

// Rounded to bf16, scale * log2(e) would be off by 0.18 % of every logit.
TEST(AttentionRules, TheScaleIsNotRounded) {
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

// The number of keys a query sees must not wrap around below zero.
TEST(AttentionRules, QueriesBeforeTheFirstKeySeeNothing) {
  for (const uint64_t tokens : {9u, 60u}) {
    const Small s = random_small(KvFormat::f16, tokens, 4);
    const Small::Answer answer = s.run();
    for (uint64_t t = 0; t + 4 < tokens; ++t) {
      EXPECT_EQ(answer.lse[t], -kInfinity);
      for (uint64_t e = 0; e < s.dim; ++e) EXPECT_EQ(answer.out[t * s.dim + e], 0);
    }
    EXPECT_TRUE(std::isfinite(answer.lse[tokens - 4]));
  }
}

}  // namespace
}  // namespace gyre::test
