#include "runtime/pipeline_cache.h"

#include <gtest/gtest.h>

#include "expect_error.h"
#include "runtime/require.h"

namespace gyre::test {
namespace {

class PipelineCacheTest : public testing::Test {
 protected:
  using Made = std::unique_ptr<Pipeline>;

  // Counts how often it is really asked.
  template <class Make>
  const Pipeline* ask(uint64_t spec, const Make& make) {
    return cache_.find_or_make(kKvCopy.info, spec, [&] {
      ++builds_;
      return make();
    });
  }
  static Made made() { return std::make_unique<Pipeline>(kKvCopy.info, 0); }
  static Made none() { return nullptr; }

  PipelineCache cache_;
  int builds_ = 0;
};

TEST_F(PipelineCacheTest, BuildsOnce) {
  const Pipeline* const first = ask(1, made);
  EXPECT_NE(first, nullptr);
  EXPECT_EQ(ask(1, made), first);
  EXPECT_EQ(builds_, 1);
  EXPECT_NE(ask(2, made), first);
  EXPECT_EQ(cache_.count(kKvCopy.info), 2u);
  EXPECT_EQ(cache_.count(kRope.info), 0u);
}

TEST_F(PipelineCacheTest, RemembersThatThereIsNone) {
  EXPECT_EQ(ask(1, none), nullptr);
  EXPECT_EQ(ask(1, made), nullptr);
  EXPECT_EQ(builds_, 1);
  EXPECT_EQ(cache_.count(kKvCopy.info), 0u);
}

TEST_F(PipelineCacheTest, RemembersWhatDoesNotCompile) {
  const auto broken = []() -> Made { fail(ErrorCode::compile_failed, "x.cu: no such thing"); };
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(
        throws_error(ErrorCode::compile_failed, {"x.cu: no such thing"}, [&] { ask(1, broken); }));
  EXPECT_EQ(builds_, 1);
  EXPECT_EQ(cache_.count(kKvCopy.info), 0u);
}

// What is short now may be there later.
TEST_F(PipelineCacheTest, TriesAgainAfterOtherFailures) {
  const auto short_now = []() -> Made { fail(ErrorCode::out_of_memory, "no memory"); };
  EXPECT_TRUE(throws_error(ErrorCode::out_of_memory, {"no memory"}, [&] { ask(1, short_now); }));
  EXPECT_NE(ask(1, made), nullptr);
  EXPECT_EQ(builds_, 2);
}

}  // namespace
}  // namespace gyre::test
