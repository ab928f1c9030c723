// What a query does not see cannot matter: later tokens, those before its window, other branches of
// a tree. NaN in one of them shows who looked.
#include "attention/attention_small.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A window that leaves only new tokens, and a row of the tree that hides them all.
TEST(AttentionVisibility, AFullyMaskedRowGivesZeroAndMinusInfinity) {
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {4u, 40u}) {
      Small s = random_small(format, tokens, 200);
      s.tree_mask.assign(tokens * tokens, 1);
      const uint64_t masked = tokens - 1;
      for (uint64_t j = 0; j < tokens; ++j) s.tree_mask[masked * tokens + j] = 0;
      s.options.mask.window = 2;
      const Small::Answer answer = s.run();
      for (uint64_t e = 0; e < s.dim; ++e) ASSERT_EQ(answer.out[masked * s.dim + e], 0);
      ASSERT_EQ(answer.lse[masked], -kInfinity);
      for (uint64_t t = 0; t < masked; ++t) {
        EXPECT_TRUE(answer.finite(t, s.dim)) << name(format) << " token " << t;
        EXPECT_NE(answer.out[t * s.dim], 0);
      }
      s.sink_logits = {-3};
      EXPECT_NEAR(s.run().lse[masked], -3, 1e-6);
    }
  }
}

// NaN in the token `bad` of K or V: exactly the queries that see it show it.
void expect_seen_by(const Small& good, uint64_t bad, const std::vector<bool>& sees) {
  const Small::Answer wanted = good.run();
  for (const bool in_k : {true, false}) {
    Small s = good;
    (in_k ? s.k : s.v)[bad * s.dim + 5] = kNaN;
    const Small::Answer got = s.run();
    for (uint64_t t = 0; t < sees.size(); ++t) {
      const auto row = std::span(got.out).subspan(t * s.dim, s.dim);
      const auto expected = std::span(wanted.out).subspan(t * s.dim, s.dim);
      const std::string where = std::string(name(s.format)) + (in_k ? " k" : " v") + " token " +
                                std::to_string(t) + " key " + std::to_string(bad);
      if (sees[t]) {
        // Rotated formats spread it over the row, dense V keeps it in its coordinate.
        EXPECT_TRUE(std::isnan(row[5])) << where;
        EXPECT_EQ(std::isnan(got.lse[t]), in_k) << where;
        continue;
      }
      EXPECT_TRUE(std::equal(row.begin(), row.end(), expected.begin())) << where;
      EXPECT_EQ(got.lse[t], wanted.lse[t]) << where;
    }
  }
}

TEST(AttentionVisibility, CausalQueriesDoNotSeeLaterNaN) {
  for (const KvFormat format : kSomeFormats) {
    const Small s = random_small(format, 5, 70);
    for (const uint64_t bad : {0u, 30u, 66u, 67u, 69u}) {
      std::vector<bool> sees(5);
      for (uint64_t t = 0; t < 5; ++t) sees[t] = bad <= 65 + t;
      expect_seen_by(s, bad, sees);
    }
  }
}

TEST(AttentionVisibility, PrefillDoesNotSeeLaterNaN) {
  for (const KvFormat format : kSomeFormats) {
    const Small s = random_small(format, 100, 130);
    for (const uint64_t bad : {3u, 64u, 100u, 129u}) {
      std::vector<bool> sees(100);
      for (uint64_t t = 0; t < 100; ++t) sees[t] = bad <= 30 + t;
      expect_seen_by(s, bad, sees);
    }
  }
}

TEST(AttentionVisibility, AWindowHidesOlderNaN) {
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {1u, 5u, 40u}) {
      Small s = random_small(format, tokens, 90);
      s.options.mask.window = 13;
      for (const uint64_t bad : {0u, 44u, 76u, 77u, 88u}) {
        std::vector<bool> sees(tokens);
        for (uint64_t t = 0; t < tokens; ++t) {
          const uint64_t own = 90 - tokens + t;
          sees[t] = bad <= own && bad + 13 > own;
        }
        expect_seen_by(s, bad, sees);
      }
    }
  }
}

TEST(AttentionVisibility, ATreeHidesNaNOfOtherBranches) {
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {6u, 40u}) {
      Small s = random_small(format, tokens, 75);
      s.tree_mask.resize(tokens * tokens);
      for (uint64_t i = 0; i < tokens; ++i) {  // two branches: even and odd tokens
        for (uint64_t j = 0; j <= i; ++j) s.tree_mask[i * tokens + j] = (i + j) % 2 == 0 ? 1 : 0;
      }
      for (const uint64_t fresh : {uint64_t{0}, uint64_t{1}, tokens - 2, tokens - 1}) {
        std::vector<bool> sees(tokens);
        for (uint64_t t = 0; t < tokens; ++t) sees[t] = s.tree_mask[t * tokens + fresh] != 0;
        expect_seen_by(s, 75 - tokens + fresh, sees);
      }
    }
  }
}

TEST(AttentionVisibility, ANaNQueryStaysInItsRow) {
  for (const KvFormat format : kSomeFormats) {
    for (const uint64_t tokens : {5u, 40u}) {
      Small s = random_small(format, tokens, 75);
      const Small::Answer wanted = s.run();
      s.q[2 * s.dim + 9] = kNaN;
      const Small::Answer got = s.run();
      for (uint64_t t = 0; t < tokens; ++t) {
        for (uint64_t e = 0; e < s.dim; ++e) {
          if (t == 2) {
            ASSERT_TRUE(std::isnan(got.out[t * s.dim + e])) << name(format) << " " << tokens;
          } else {
            ASSERT_EQ(got.out[t * s.dim + e], wanted.out[t * s.dim + e]) << name(format);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gyre::test
