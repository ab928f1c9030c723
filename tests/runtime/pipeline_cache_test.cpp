#include "runtime/pipeline_cache.h"

#include <gtest/gtest.h>

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

// Built later: counted when it is.
struct Later : Pipeline {
  Later() : Pipeline(kKvCopy.info, 0) { set_built(false); }
  void wait() const override { set_built(true); }
};

TEST_F(PipelineCacheTest, CountsWhatIsBuilt) {
  const Pipeline* const later = ask(1, [] { return std::make_unique<Later>(); });
  EXPECT_EQ(cache_.count(kKvCopy.info), 0u);
  later->finish();
  EXPECT_TRUE(later->is_built());
  EXPECT_EQ(cache_.count(kKvCopy.info), 1u);
  EXPECT_EQ(ask(1, made), later);
}

}  // namespace
}  // namespace gyre::test
